"""Typed, strict parameters: text becomes a value of the declared type, or the run stops and says what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from notebook_maker import make

from workbench.core.params import Params, convert, describe, param, parse_text
from workbench.suite import Notebook, NotebookError, ParameterError, select
from workbench.suite.parameters import assign, check, read_parameter_file, split_assignments


@dataclass(frozen=True, kw_only=True)
class Sample(Params):
    blocks: int = param(8, "blocks of one step", min=1, max=64)
    submit_us: float = param(1.55, "host cost of one submission", unit="us", min=0.0)
    routed: bool = param(True, "with a router")
    mode: str = param("dense", "which timeline", choices=("dense", "routed"))
    sizes: tuple[int, ...] = param((1, 2), "sizes", min=1)
    trace: str = param("", "file")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "routed" and not self.routed:
            raise ValueError("mode 'routed' needs routed=true")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("blocks", "7", 7),
        ("blocks", "007", 7),
        ("submit_us", "1e-3", 0.001),
        ("submit_us", "2", 2.0),
        ("routed", "false", False),
        ("mode", "routed", "routed"),
        ("sizes", "4,8", [4, 8]),
        ("sizes", "[4, 8]", [4, 8]),
        ("trace", "true", "true"),
    ],
)
def test_text_becomes_the_declared_type(name: str, text: str, value: object) -> None:
    found = convert(Sample, {name: text})
    assert found == {name: value} and type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("blocks", "7.5", "expected a whole number, got '7.5'"),
        ("blocks", "0", "expected 1 to 64, got 0"),
        ("blocks", "65", "1 to 64"),
        ("submit_us", "fast", "expected a number, got 'fast'"),
        ("submit_us", "nan", "finite"),
        ("submit_us", "-1", "0.0 to inf"),
        ("routed", "yes", "expected true or false, got 'yes'"),
        ("mode", "both", "'dense', 'routed'"),
        ("sizes", "1,x", "expected a whole number, got 'x'"),
        ("sizes", "[1", "expected a JSON list"),
        ("block", "7", "unknown parameter 'block'; did you mean 'blocks'?"),
    ],
)
def test_bad_value_names_what_is_allowed(name: str, text: str, words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        convert(Sample, {name: text})
    assert words in str(caught.value)
    assert "blocks: int = 8  # blocks of one step; 1 to 64" in str(caught.value) or name != "blocks"


def test_bounds_are_listed_for_an_unknown_name() -> None:
    with pytest.raises(ParameterError) as caught:
        convert(Sample, {"speed": "1"})
    for line in (
        "blocks: int = 8  # blocks of one step; 1 to 64",
        "submit_us: float = 1.55  # host cost of one submission; us; 0.0 to inf",
        "mode: str = 'dense'  # which timeline; one of dense, routed",
    ):
        assert line in str(caught.value)


def test_checks_across_fields_use_the_notebooks_own_defaults() -> None:
    assert convert(Sample, {"mode": "routed"}) == {"mode": "routed"}
    with pytest.raises(ParameterError, match="needs routed=true"):
        convert(Sample, {"mode": "routed"}, base={"routed": False})


@given(
    st.one_of(
        st.tuples(st.just(int), st.integers()),
        st.tuples(st.just(float), st.floats(allow_nan=False)),
        st.tuples(st.just(bool), st.booleans()),
    )
)
def test_text_of_a_value_reads_back_as_itself(pair: tuple[type, object]) -> None:
    kind, value = pair
    assert parse_text(str(value), kind) == value


@given(st.text())
def test_text_stays_text(text: str) -> None:
    assert parse_text(text, str) == text


@given(st.text(max_size=8))
def test_nothing_but_true_and_false_is_a_truth_value(text: str) -> None:
    if text.strip().lower() not in ("true", "false"):
        with pytest.raises(ValueError, match="true or false"):
            parse_text(text, bool)


def test_describe_is_plain_json() -> None:
    rows = {r["name"]: r for r in describe(Sample)}
    assert rows["blocks"] == {
        "name": "blocks",
        "type": "int",
        "default": 8,
        "min": 1,
        "max": 64,
        "doc": "blocks of one step",
    }
    assert rows["sizes"]["default"] == [1, 2]


CELL = 'source = "auto"\nn = 3\nrate: float = 2\nname = "a"\nsizes = [1, 2]\nroot = some()'


@pytest.fixture
def own(tmp_path: Path) -> list[Notebook]:
    """Two notebooks of one's own, without an experiment."""
    return [
        Notebook(make(tmp_path, "one", "x", parameters=CELL)),
        Notebook(make(tmp_path, "two", "x", parameters="n = 1")),
    ]


def test_notebook_of_ones_own_is_typed_by_its_cell(own: list[Notebook]) -> None:
    given_text = {"n": "4", "rate": "1", "name": "12", "sizes": "3"}
    assert check(own[0], given_text) == {"n": 4, "rate": 1.0, "name": "12", "sizes": [3]}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("n", "x", "expected a whole number"),
        ("n", 2.5, "expected int, got float 2.5"),
        ("n", True, "expected int, got bool True"),
        ("root", "1", "its type is not declared"),
        ("m", "1", "unknown parameter 'm'"),
    ],
)
def test_bad_value_for_a_notebook_of_ones_own(own: list[Notebook], name: str, value: object, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        check(own[0], {name: value})


def test_shared_parameter_goes_where_it_exists(own: list[Notebook]) -> None:
    assert assign(own, {"rate": "5", "n": "2"}, {}, None) == {"one": {"rate": 5.0, "n": 2}, "two": {"n": 2}}
    assert assign(own, {}, {"two": {"n": 9}}, "model") == {"one": {"source": "model"}, "two": {"n": 9}}


def test_parameter_that_no_notebook_has_is_an_error(own: list[Notebook]) -> None:
    with pytest.raises(ParameterError, match=r"unknown parameter 'rates'; did you mean 'rate'\?"):
        assign(own, {"rates": "5"}, {}, None)
    with pytest.raises(ParameterError, match="two: unknown parameter 'rate'"):
        assign(own, {}, {"two": {"rate": 5}}, None)
    with pytest.raises(ParameterError, match="use --source"):
        assign(own, {"source": "model"}, {}, None)
    with pytest.raises(ParameterError, match="expected one of auto, model"):
        assign(own, {}, {}, "moon")


def test_path_counts_from_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (notebook,) = select(["fig66_batch_warmup"])
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check(notebook, {"archive": "runs", "metrics": "ce=loss"}) == {
        "archive": str(tmp_path / "runs"),
        "metrics": ["ce=loss"],
    }
    assert check(notebook, {"archive": ""}) == {"archive": ""}
    with pytest.raises(ParameterError, match="'archive': no file or folder 'run' in the current folder"):
        check(notebook, {"archive": "run"})


def test_parameters_cell_holds_assignments_only(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="more than assignments"):
        _ = Notebook(make(tmp_path, "calls", "x", parameters="n = 1\nprint(n)")).declared


@pytest.mark.parametrize(("item", "words"), [("n", "expected name=value"), ("=3", "expected name=value")])
def test_assignment_text(item: str, words: str) -> None:
    assert split_assignments(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    with pytest.raises(ParameterError, match=words):
        split_assignments([item])
    with pytest.raises(ParameterError, match="given twice"):
        split_assignments(["a=1", "a=2"])


@pytest.mark.parametrize("text", ["- 1", "a: [", "3: x", "!!python/object/apply:os.system ['true']"])
def test_bad_parameter_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ParameterError, match="parameter file"):
        read_parameter_file(tmp_path / "p.yaml")


def test_number_that_yaml_reads_as_text_is_still_typed() -> None:
    assert convert(Sample, {"submit_us": "1e3"}) == {"submit_us": 1000.0}
    with pytest.raises(ParameterError, match="expected bool, got int"):
        convert(Sample, {"routed": 1})


def test_ones_own_trace_and_another_analysis_are_no_other_measurement(tmp_path: Path) -> None:
    (notebook,) = select(["your_trace"])
    trace = tmp_path / "t.json"
    trace.write_text("{}")
    given = {"trace": str(trace), "window": "steps", "host_scale": "0.5", "remove_waits": "false"}
    found = assign([notebook], {}, {"your_trace": given}, "recorded")["your_trace"]
    assert found["trace"] == str(trace) and found["window"] == "steps" and found["host_scale"] == 0.5
