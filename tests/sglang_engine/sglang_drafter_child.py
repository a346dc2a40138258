"""SGLang's DFlash drafter, loaded from a directory: run by .venv-sglang's Python on a CPU.

    python sglang_drafter_child.py DRAFTER IN OUT

IN holds states, [n, L * H]. OUT gets what SGLang makes of them, and what it read of the config.
"""

# pyright: reportMissingImports=false

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.distributed import parallel_state
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from transformers import AutoConfig


def main(drafter: Path, given: Path, out: Path) -> None:
    server = ServerArgs(model_path=str(drafter), device="cpu")
    set_global_server_args_for_scheduler(server)
    meet = f"file://{out.with_suffix('.meet')}"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=meet
    )
    parallel_state.initialize_model_parallel()
    config = AutoConfig.from_pretrained(drafter)
    model = DFlashDraftModel(config)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # SGLang skips a weight that it does not know
    model.load_weights(iter(load_file(drafter / "model.safetensors").items()))
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    block = model.layers[0]
    with torch.no_grad():
        context = model.project_target_hidden(torch.load(given))
        found = {
            "missing": [name for name, value in model.named_parameters() if value.isnan().any()],
            "block_size": parsed.block_size,
            "mask_token_id": parsed.mask_token_id,
            "layer_ids": parsed.resolve_target_layer_ids(
                target_num_layers=config.num_target_layers
            ),
            "context": context,
            "qkv": block.self_attn.qkv_proj(context)[0],
            "mlp": block.mlp(context),
        }
    torch.save(found, out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
