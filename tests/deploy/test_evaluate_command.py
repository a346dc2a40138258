"""`draftfeed evaluate` and `draftfeed drafter export`, as a user calls them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftfeed_consumer import evaluate
from draftfeed_consumer.trainers import TrainerRun, dflash
from draftfeed_consumer.trainers.specforge import draft_config
from draftfeed_deploy import drafter_tools
from draftfeed_deploy.cli import main
from tiny_models import make_qwen3, make_qwen35_multimodal

pytestmark = pytest.mark.timeout(300)

PROMPTS = "".join(
    f'{{"id": "p{number}", "messages": [{{"role": "user", "content": "hello {number}"}}]}}\n'
    for number in range(3)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, hybrid/, and run/ and hybrid_run/ with a checkpoint each, of untrained drafters."""
    folder = tmp_path_factory.mktemp("evaluate")
    make_run(folder / "run", make_qwen3(folder / "target"))
    make_run(folder / "hybrid_run", make_qwen35_multimodal(folder / "hybrid"))
    (folder / "prompts.jsonl").write_text(PROMPTS)
    return folder


def make_run(out: Path, target: Path) -> None:
    options = {"mask_token_id": 3, "block_size": 4}
    config = draft_config(TrainerRun(target=target, output_dir=out, options=options), (1, 3))
    weights = dflash.build_drafter(config, target).state_dict()
    checkpoint = out / "drafter-1.1-step7"
    checkpoint.mkdir(parents=True)
    dflash.save_config(config, out)
    torch.save({"draft_state_dict": weights}, checkpoint / dflash.STATE_FILE)


def run(folder: Path, *arguments: object, drafter: str = "run", target: str = "target") -> int:
    where = [folder / drafter, "--target", folder / target]
    given = [*where, "--heldout", folder / "prompts.jsonl", "--max-new-tokens", 8, *arguments]
    return main(["evaluate", *map(str, given)])


def error_of(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one line of a command with bad input."""
    assert code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("draftfeed: ")]
    assert len(errors) == 1, lines
    assert "Traceback" not in "".join(lines)
    return errors[0]


@pytest.mark.parametrize(("drafter", "target"), [("run", "target"), ("hybrid_run", "hybrid")])
def test_a_run_is_evaluated(
    folder: Path, capsys: pytest.CaptureFixture[str], drafter: str, target: str
) -> None:
    assert run(folder, drafter=drafter, target=target) == 0
    said = capsys.readouterr().out
    assert f"{drafter}/drafter-1.1-step7" in said
    assert "prompts          3 of" in said
    assert "accepted length  1." in said
    assert "  3: " in said
    assert "  4: " not in said
    assert "the target's own for every prompt" in said


def test_json_has_every_prompt_and_the_sums_agree(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--json", "--prompts", 2) == 0
    found = json.loads(capsys.readouterr().out)
    assert [prompt["key"] for prompt in found["prompts"]] == ["p0", "p1"]
    for name in ("new_tokens", "target_calls"):
        assert found[name] == sum(prompt[name] for prompt in found["prompts"])
    assert found["accepted_length"] == found["new_tokens"] / found["target_calls"]
    assert found["accepted_length"] == pytest.approx(1 + sum(found["acceptance_by_position"]))
    assert len(found["acceptance_by_position"]) == 3
    assert found["same_as_greedy"]


def test_the_export_is_evaluated_as_its_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "drafter"
    assert main(["drafter", "export", str(folder / "run"), str(out), "--dtype", "float32"]) == 0
    assert "drafter-1.1-step7 as a Hugging Face directory" in capsys.readouterr().out
    found = []
    for drafter in (folder / "run", folder / "run" / "drafter-1.1-step7", out):
        assert run(folder, "--json", drafter=str(drafter)) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert {**found[2], "drafter": ""} == {**found[0], "drafter": ""}


def test_the_demos_held_out_prompts_are_the_default(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [str(folder / "run"), "--target", str(folder / "target")]
    assert main(["evaluate", *where, "--prompts", "1", "--max-new-tokens", "2"]) == 0
    assert "1 of " in (said := capsys.readouterr().out)
    assert "heldout.jsonl" in said
    shipped = Path(drafter_tools.__file__).parent / "data" / "heldout.jsonl"
    assert len(shipped.read_text().splitlines()) == drafter_tools.HELDOUT_PROMPTS


def test_output_that_is_not_the_targets_own_is_an_error_that_names_the_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target answers passes over blocks wrongly, as with a cache out of step, but not those
    over one token, nor over the prompts."""
    load = evaluate.load_target

    def wrong_for_blocks(*arguments: Any) -> Any:
        def shift(module: Any, inputs: Any, kwargs: Any, output: Any) -> None:
            if kwargs["logits_to_keep"] == 4:
                output.logits = output.logits.roll(1, dims=-1)

        model = load(*arguments)
        model.register_forward_hook(shift, with_kwargs=True)
        return model

    monkeypatch.setattr(evaluate, "load_target", wrong_for_blocks)
    assert run(folder, "--prompts", 2) == 1
    assert "DIFFERENT from the target's own for p0, p1" in capsys.readouterr().out


def test_another_targets_drafter_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, run(folder, target="hybrid"))
    assert "is of another target: its num_target_layers is 6" in said


def test_a_damaged_checkpoint_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", folder / "target")
    file = tmp_path / "run" / "drafter-1.1-step7" / dflash.STATE_FILE
    file.write_bytes(file.read_bytes()[:1000])
    said = error_of(capsys, run(folder, drafter=str(tmp_path / "run")))
    assert "cannot be read as a checkpoint" in said
    out = tmp_path / "out"
    said = error_of(capsys, main(["drafter", "export", str(tmp_path / "run"), str(out)]))
    assert "cannot be read as a checkpoint" in said
    assert not out.exists()


def test_nothing_there_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is no drafter" in error_of(capsys, run(folder, drafter=str(tmp_path)))
    assert "is not a directory" in error_of(capsys, run(folder, target="nowhere"))
    missing = run(folder, "--heldout", tmp_path / "none.jsonl")
    assert "none.jsonl: cannot be read" in error_of(capsys, missing)
    assert "--device gpu:" in error_of(capsys, run(folder, "--device", "gpu"))


def test_a_target_with_damaged_weights_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_qwen3(tmp_path / "target")
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    said = error_of(capsys, run(folder, target=str(target)))
    assert "its weights cannot be loaded" in said


def test_an_export_overwrites_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    said = error_of(capsys, main(["drafter", "export", str(folder / "run"), str(tmp_path)]))
    assert "is not empty; choose another OUT" in said
    said = error_of(capsys, main(["drafter", "export", str(folder / "run"), str(kept)]))
    assert "cannot be written" in said
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("tokens", ["1", "0", "none"])
def test_fewer_tokens_than_two_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], tokens: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(folder, "--max-new-tokens", tokens)
    assert caught.value.code == 2
    assert "--max-new-tokens" in capsys.readouterr().err
