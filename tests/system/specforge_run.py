"""SpecForge as the consumer of a `Run`, with a target that is too small to be slow."""

import tiny_target
from processes import Run

CONSUMER = """
[producer]
addresses = ["{address}"]
[buffer]
capacity_bytes = 4_000_000
window_samples = 2
[trainer]
kind = "specforge"
target = "target"
output_dir = "out"
[trainer.options]
mask_token_id = 3
num_anchors = 4
block_size = 4
resume_from = "latest"
batch_size = {batch_size}
save_interval_steps = {save_interval_steps}
"""
_SETTINGS = (
    f"engine.num_layers={tiny_target.LAYERS}",
    f"engine.layer_ids={list(tiny_target.LAYER_IDS)}",
    f"engine.hidden_size={tiny_target.HIDDEN}",
    f"engine.vocab_size={tiny_target.VOCAB}",
    "engine.max_tokens=128",
)
SHAPE = tuple(option for setting in _SETTINGS for option in ("--set", setting))
"""Options of the producer, whose stream is that of the target."""


def configure(run: Run, batch_size: int, save_interval_steps: int) -> None:
    tiny_target.make(run.directory / "target")
    settings = {"batch_size": batch_size, "save_interval_steps": save_interval_steps}
    text = CONSUMER.format(address=run.address, **settings)
    (run.directory / "consumer.toml").write_text(text)
