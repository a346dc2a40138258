"""A loop of one's own, the example as it stands, on SmolLM2's states while they are generated."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from asset_nodes import DRAFTFEED, Start, ended, processes_in
from draftfeed_deploy import smollm2
from draftfeed_deploy.cli import main

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROMPTS = [f"Name {number} things that are {what}." for number in (1, 3) for what in "abcd"]
PRODUCER = """
[engine]
name = "transformers"
dtype = "float32"
threads = 1
batch_size = 4
sampling = {{ max_new_tokens = 16 }}
[target]
path = "{target}"
[prompts]
path = "prompts.jsonl"
max_prompt_tokens = 64
[spool]
dir = "spool"
[server]
bind = "ipc://{socket}"
"""
CONSUMER = """
[producer]
addresses = ["ipc://{socket}"]
[buffer]
capacity_bytes = 50_000_000
batch_samples = 5
window_samples = 2
[trainer]
function = "custom_trainer:train"
output_dir = "out"
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with processes_in(tmp_path) as starting:
        yield starting


def test_example_trainer_learns_from_smollm2_while_it_generates(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = smollm2.prepare()
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    socket = tmp_path / "s"
    (tmp_path / "producer.toml").write_text(PRODUCER.format(target=target, socket=socket))
    (tmp_path / "consumer.toml").write_text(CONSUMER.format(socket=socket))
    monkeypatch.syspath_prepend(EXAMPLES)
    producer = start(DRAFTFEED, "producer", "-c", "producer.toml")
    code, output = ended(start(DRAFTFEED, "consumer", "-c", "consumer.toml", "--run-dir", "run"))
    assert code == 0, output
    assert ended(producer)[0] == 0
    steps = [json.loads(line) for line in (tmp_path / "run/steps.jsonl").read_text().splitlines()]
    assert len({id for step in steps for id in step["ids"]}) == len(PROMPTS)
    assert all(0 < step["loss"] < 100 for step in steps)
    assert list((tmp_path / "out").glob("*.pt"))
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "-c", "producer.toml"]) == 0
