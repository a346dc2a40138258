"""SGLang's own DFlash class reads an exported drafter. Its attention needs a GPU's kernels: what
is compared is everything before and behind that."""

import subprocess
from pathlib import Path

import pytest
import torch

from draftfeed_consumer import drafter_files
from draftfeed_consumer.trainers import TrainerRun, dflash
from draftfeed_consumer.trainers.specforge import draft_config
from sglang_engines import PYTHON

CHILD = Path(__file__).with_name("sglang_drafter_child.py")
LAYER_IDS = (1, 3)


@pytest.mark.timeout(300)
def test_sglang_loads_every_weight_of_an_export(tiny_qwen3: Path, tmp_path: Path) -> None:
    options = {"mask_token_id": 3, "block_size": 4}
    run = TrainerRun(target=tiny_qwen3, output_dir=tmp_path / "run", options=options)
    config = draft_config(run, LAYER_IDS)
    drafter = dflash.build_drafter(config, tiny_qwen3)
    files = drafter_files.DrafterFiles(config.to_specforge(), drafter.state_dict(), tmp_path)
    exported = tmp_path / "drafter"
    exported.mkdir()
    drafter_files.export(files, exported, "float32")
    states = torch.randn(7, drafter.fc.in_features)
    torch.save(states, tmp_path / "states.pt")
    command = [PYTHON, CHILD, exported, tmp_path / "states.pt", tmp_path / "found.pt"]
    subprocess.run(list(map(str, command)), check=True)
    found = torch.load(tmp_path / "found.pt")
    assert found["missing"] == []
    assert found["block_size"] == 4
    assert found["mask_token_id"] == 3
    assert found["layer_ids"] == list(LAYER_IDS)
    block = drafter.layers[0]
    with torch.no_grad():
        context = drafter.hidden_norm(drafter.fc(states))
        torch.testing.assert_close(found["context"], context)
        names = ("q_proj", "k_proj", "v_proj")
        qkv = [getattr(block.self_attn, name)(context) for name in names]
        torch.testing.assert_close(found["qkv"], torch.cat(qkv, dim=-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["mlp"], block.mlp(context), rtol=1e-4, atol=1e-4)
