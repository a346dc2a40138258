"""Writes draftfeed.json beside it: a Grafana dashboard over the metrics of draftfeed's services.

    python deploy/grafana/make.py [FILE]

Standard library only. Change panels.py or this file, and never the JSON.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panels import ROWS, Panel

OUTPUT = Path(__file__).with_name("draftfeed.json")
WIDTH = 24
"""Of Grafana's grid."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ONE_RUN = '{run=~"$run", instance=~"$instance"}'
MATCHERS = 'run=~"$run", instance=~"$instance"'
Json = dict[str, Any]


def dashboard() -> Json:
    return {
        "uid": "draftfeed",
        "title": "draftfeed",
        "description": "Whether data flows, how fast, what it waits for, whether it is right.",
        "tags": ["draftfeed"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": variables()},
        "panels": list(panels()),
    }


def variables() -> list[Json]:
    every = {"type": "query", "datasource": SOURCE, "refresh": 2, "includeAll": True, "sort": 1}
    some = {**every, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    phase = "draftfeed_producer_phase"
    up = 'up{job=~"draftfeed_.*", run=~"$run"}'
    return [
        {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
        {**some, "name": "run", "label": "Run", "query": f"label_values({phase}, run)"},
        {**some, "name": "instance", "label": "Service", "query": f"label_values({up}, instance)"},
    ]


def panels() -> Iterator[Json]:
    """Rows of the grid from left to right, each row as high as its highest panel."""
    number, top = 0, 0
    for row in ROWS:
        number += 1
        place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
        heading = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        yield {"id": number, "gridPos": place, **heading}
        top, left, high = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, high = top + high, 0, 0
            number += 1
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield {"id": number, "gridPos": place, **panel_json(panel)}
            left, high = left + panel.width, max(high, panel.height)
        top += high


def panel_json(panel: Panel) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.words,
        "datasource": SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": expression(query.text),
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults(panel), "overrides": []},
        "options": options(panel),
    }


def expression(text: str) -> str:
    """With the matchers: x@ becomes x{...}, and x{a="b", @} becomes x{a="b", ...}."""
    return text.replace(", @}", f", {MATCHERS}}}").replace("@", ONE_RUN)


def defaults(panel: Panel) -> Json:
    found: Json = {"unit": panel.unit, "custom": {}}
    if panel.kind == "timeseries":
        found["custom"] = {
            "fillOpacity": 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "line" if panel.steps else "off"},
        }
        found |= {
            name: value
            for name, value in (("min", panel.least), ("max", panel.most))
            if value is not None
        }
    if panel.states:
        found["mappings"] = [{"type": "value", "options": named_states(panel)}]
    if panel.steps:
        found["thresholds"] = {"mode": "absolute", "steps": thresholds(panel)}
    return found


def named_states(panel: Panel) -> Json:
    return {
        str(value): {"text": text, "color": colour, "index": value}
        for value, (text, colour) in enumerate(zip(panel.states, panel.colours, strict=True))
    }


def thresholds(panel: Panel) -> list[Json]:
    """Grafana's first step has no value: it is below all others."""
    (_, base), *rest = panel.steps
    return [
        {"value": None, "color": base},
        *({"value": value, "color": colour} for value, colour in rest),
    ]


def options(panel: Panel) -> Json:
    match panel.kind:
        case "stat":
            shown = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": shown, "colorMode": "background", "graphMode": "area"}
        case "state-timeline":
            return {"mergeValues": True, "showValue": "auto", "legend": {"showLegend": False}}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    Path(*sys.argv[1:2] or [OUTPUT]).write_text(text())
