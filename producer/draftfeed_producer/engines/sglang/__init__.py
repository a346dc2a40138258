"""SGLang as the engine: a host process runs it, a plugin in its scheduler takes the rows.

    producer ── prompts ──→ host (sgl.Engine) ──→ scheduler: model, plugin, staging ring
        ↑                        │ responses                       │ rows, in shared memory
        └────────────────────────┴─────────────────────────────────┘

The producer itself never imports sglang, so the two may live in different environments.
"""
