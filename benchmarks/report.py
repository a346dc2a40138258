"""What benchmarks say while they run, and the document that they leave."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def say(options: argparse.Namespace, line: str) -> None:
    """Beside the document, where that is asked for (`--json`)."""
    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)


def leave(options: argparse.Namespace, result: dict[str, Any], name: str) -> None:
    """Print the document, or write it to results/ under a name, as the options say."""
    text = json.dumps(result, indent=2)
    if options.json:
        print(text)
    if options.write:
        path = RESULTS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
        say(options, f"written to {path}")
