"""`draftfeed top` on a terminal: one picture, drawn anew every second."""

import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from draftfeed_deploy.top_view import LEAST_WIDTH, picture
from draftfeed_deploy.top_watch import Watch

DRAW_SECONDS = 1.0


class Picture(Static):
    """As wide as the terminal."""

    def __init__(self, watch: Watch, draw_seconds: float) -> None:
        super().__init__()
        self._watch, self._draw_seconds = watch, draw_seconds
        self.shown = Text()

    def on_mount(self) -> None:
        self.draw()
        self.set_interval(self._draw_seconds, self.draw)

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        lines = picture(self._watch.services(), self.app.size.width, time.time())
        text = Text("\n").join(lines)
        if text != self.shown:  # updating asks for a new layout, and may resize this
            self.shown = text
            self.update(text)


class Top(App[None]):
    TITLE = "draftfeed top"
    CSS = (
        f"Picture {{ width: 100%; min-width: {LEAST_WIDTH}; text-wrap: nowrap; }} "
        "VerticalScroll { scrollbar-size: 0 0; overflow-x: auto; }"
    )
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,ctrl+c", "quit", "quit")]

    def __init__(self, watch: Watch, draw_seconds: float = DRAW_SECONDS) -> None:
        super().__init__()
        self.picture = Picture(watch, draw_seconds)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self.picture
