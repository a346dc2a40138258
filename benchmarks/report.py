"""What benchmarks say while they run, and the document that they leave."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def options_of(parser: argparse.ArgumentParser, document: str) -> argparse.Namespace:
    """What was asked for, by the parser's own options and those of all scripts that leave a
    document, results/`document`. With `--quick` there is one round."""
    parser.add_argument("--json", action="store_true", help="print everything, as one document")
    parser.add_argument("--write", action="store_true", help=f"leave results/{document}")
    parser.set_defaults(document=document)
    options = parser.parse_args()
    if getattr(options, "quick", False):
        options.rounds = 1
    return options


def say(options: argparse.Namespace, line: str) -> None:
    """Beside the document, where that is asked for (`--json`)."""
    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)


def leave(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print the document, or write it to results/, as the options say."""
    text = json.dumps(result, indent=2)
    if options.json:
        print(text)
    if options.write:
        path = RESULTS / options.document
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
        say(options, f"written to {path}")
