from typing import Any

from workbench.lab import charts
from workbench.lab.live.board import Board

from . import synthetic


class Heard(Board):
    """A board that keeps what it sends."""

    def __init__(self, **more: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        super().__init__(**more)

    def send(self, content: Any, buffers: Any = None) -> None:
        self.sent.append(content)


def test_rows_travel_apart_from_declarations() -> None:
    board = Heard()
    figure = charts.memory(synthetic.profile())
    board.put(figure)
    assert [f["name"] for f in board.figures] == ["memory"] and "values" not in board.figures[0][
        "spec"
    ]["data"]
    assert board.sent[-1]["charts"]["memory"] == {"rows": figure.rows, "append": False}


def test_new_rows_are_sent_alone_and_a_reloaded_page_gets_all() -> None:
    board = Heard()
    profile = synthetic.profile("measured", 1, steps=3)
    board.put(charts.loss(profile))
    board.extend("loss", [{"run": "plan", "step": 3, "loss": 1.0, "text": "training"}])
    assert (
        len(board.sent[-1]["charts"]["loss"]["rows"]) == 1
        and board.sent[-1]["charts"]["loss"]["append"]
    )
    board._receive(board, {"type": "hello"}, [])
    snapshot = board.sent[-1]["charts"]["loss"]
    assert len(snapshot["rows"]) == 4 and not snapshot["append"]


def test_an_equal_declaration_is_not_sent_again() -> None:
    board = Heard()
    board.put(charts.memory(synthetic.profile()))
    changes: list[Any] = []
    board.observe(changes.append, "figures")
    board.put(charts.memory(synthetic.profile()))
    assert changes == []
    board.put(charts.memory(synthetic.profile(world=3)))
    assert len(changes) == 1


def test_charts_keep_their_order_and_can_go() -> None:
    board = Heard()
    profile = synthetic.profile()
    board.put(charts.memory(profile), charts.step_time_parts(profile))
    board.put(charts.memory(synthetic.profile(world=2)))
    assert [f["name"] for f in board.figures] == ["memory", "parts"]
    board.remove("memory", "nothing")
    assert [f["name"] for f in board.figures] == ["parts"]


def test_a_pressed_button_is_answered_even_where_nothing_changes() -> None:
    pressed: list[str] = []
    board = Heard(on_press=pressed.append)
    board.show_banner(headline="same")
    before = dict(board.banner)
    board._receive(board, {"type": "press", "action": "stop"}, [])
    assert pressed == ["stop"] and board.banner != before
    board.show_banner(headline="same")
    assert board.banner["turn"] == 1


def test_a_board_is_scrolled_to_once_by_whichever_page_shows_it_first() -> None:
    board = Heard()
    board.reveal()  # before any page shows it
    board._receive(board, {"type": "hello"}, [])
    assert [sent["type"] for sent in board.sent] == ["reveal", "reveal"]
    board._receive(board, {"type": "revealed"}, [])
    board._receive(board, {"type": "hello"}, [])  # the page is loaded again
    assert len(board.sent) == 2


def test_what_json_does_not_know_is_sent_as_null() -> None:
    board = Heard()
    board.put(charts.loss(synthetic.profile("measured", 1, steps=1)))
    board.extend("loss", [{"step": 1, "loss": float("nan")}])
    assert board.rows("loss")[-1]["loss"] is None
