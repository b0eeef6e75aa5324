"""Configuration files, overrides, and the errors that a user reads."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.config import JOBS, JobConfig, RLConfig, SFTConfig
from asyncrl.config_help import config_help, section_of
from asyncrl.config_load import load_config, resolved_toml
from asyncrl.errors import ConfigError
from asyncrl.suggest import nearest
from asyncrl.toml_lines import key_lines

ROOT = Path(__file__).resolve().parent.parent

RL = """\
job = "rl"
name = "demo"
steps = 3

[model]
path = "model"

[data]
train = "prompts.jsonl"

[reward]
function = "asyncrl.rewards:exact_match"

[algorithm]
name = "grpo"

[learners]
lr = 1e-4
"""


def problems_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """The problems of a file, with its path shortened to run.toml."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [problem.replace(str(path), "run.toml") for problem in caught.value.problems]


def load(tmp_path: Path, text: str, *overrides: str) -> Any:
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml", overrides)


def test_valid_file(tmp_path: Path) -> None:
    config = load(tmp_path, RL)
    assert isinstance(config, RLConfig)
    assert (config.steps, config.learners.lr, config.learners.num_ranks) == (3, 1e-4, 2)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_examples_load(path: Path) -> None:
    assert load_config(path).name == path.stem.replace("_async", "_sort")


def test_unknown_key_names_the_line_and_the_nearest_key(tmp_path: Path) -> None:
    text = RL.replace("lr = 1e-4", "num_ranks = 2\nlearning_rate = 1e-4")
    assert problems_of(tmp_path, text) == ["run.toml:19: [learners] unknown key 'learning_rate'; did you mean 'lr'?"]


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("[learner]\nlr = 1", "run.toml:20: unknown section [learner]; did you mean [learners]?"),
        ("steps = 4", "run.toml:20: [learners] unknown key 'steps'; did you mean the top-level key 'steps'?"),
        (
            "group_size = 4",
            "run.toml:20: [learners] unknown key 'group_size'; did you mean 'group_size' of [algorithm]?",
        ),
        ("num_generations = 4", "'num_generations'; did you mean 'group_size' of [algorithm]?"),
        ("zzz = 4", "[learners] unknown key 'zzz'; there is num_ranks, device, lr, warmup_steps"),
    ],
)
def test_unknown_keys_lead_to_the_right_one(tmp_path: Path, addition: str, expected: str) -> None:
    (problem,) = problems_of(tmp_path, f"{RL}\n{addition}\n")
    assert expected in problem


def test_a_setting_of_another_job_is_unknown(tmp_path: Path) -> None:
    text = RL.replace('job = "rl"', 'job = "sft"').replace('function = "asyncrl.rewards:exact_match"', "")
    problems = problems_of(tmp_path, text.replace('[algorithm]\nname = "grpo"', ""))
    assert problems == ['run.toml:11: unknown section [reward]; it belongs to job = "rl", and this is job = "sft"']


def test_all_problems_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = RL.replace("steps = 3", 'steps = "3"').replace("lr = 1e-4", "lr = -1.0\nnum_rank = 2\nbetas = [0.9, 1.5]")
    text = text.replace('name = "grpo"', 'name = "grpo"\nnum_minibatches = 3').replace('train = "prompts.jsonl"', "")
    assert problems_of(tmp_path, text, "--mode=asink") == [
        'run.toml:3: steps must be an integer > 0; got "3"',
        "run.toml:8: [data] train is missing; it must be a string (JSONL file of prompts, one object per line)",
        "run.toml:19: [learners] lr must be a number > 0; got -1.0",
        "run.toml:20: [learners] unknown key 'num_rank'; did you mean 'num_ranks'?",
        "run.toml:21: [learners] betas must be a list of 2, each a number >= 0 and < 1; got [0.9, 1.5]",
        '(command line): mode must be one of "async", "sync"; got "asink"; did you mean "async"?',
    ]


def test_cross_field_problems_beside_others(tmp_path: Path) -> None:
    text = RL.replace('name = "grpo"', 'name = "grpo"\nnum_minibatches = 3').replace("lr = 1e-4", "lr = 0")
    assert problems_of(tmp_path, text) == [
        "run.toml:16: [algorithm] num_minibatches must divide groups_per_step = 16; got 3",
        "run.toml:19: [learners] lr must be a number > 0; got 0",
    ]


def test_several_cross_field_problems(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, RL, "--learners.num_ranks=3", "--generators.max_concurrent_rollouts=4")
    assert len(problems) == 2
    assert problems[0].startswith("(command line): [learners] num_ranks must divide the 16 groups")
    assert problems[1].startswith("(command line): [generators] max_concurrent_rollouts must hold one group")


@pytest.mark.parametrize("value", ["true", '"2"', "2.0", "[2]", "0", "-1", "2026-01-01"])
def test_wrong_types_are_not_converted(tmp_path: Path, value: str) -> None:
    (problem,) = problems_of(tmp_path, RL.replace("lr = 1e-4", f"num_ranks = {value}"))
    assert problem.startswith("run.toml:18: [learners] num_ranks must be an integer > 0; got ")


@pytest.mark.parametrize("value", ["nan", "inf", "true"])
def test_numbers_are_finite(tmp_path: Path, value: str) -> None:
    (problem,) = problems_of(tmp_path, RL.replace("1e-4", value))
    assert "[learners] lr must be a number > 0; got" in problem


def test_missing_section_says_what_it_needs(tmp_path: Path) -> None:
    text = RL.replace('[model]\npath = "model"\n', "")
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith("run.toml: section [model] is missing; it needs path (Folder of a Hugging Face")


def test_a_value_where_a_section_belongs(tmp_path: Path) -> None:
    text = RL.replace('[model]\npath = "model"\n', "").replace("steps = 3", 'steps = 3\nmodel = "m"')
    assert problems_of(tmp_path, text) == ['run.toml:4: [model] must be a section of keys; got "m"']


def test_missing_and_misspelt_job(tmp_path: Path) -> None:
    (missing,) = problems_of(tmp_path, 'name = "x"')
    assert missing.startswith('run.toml: job is missing; add job = "rl" (Reinforcement learning')
    assert 'or job = "sft" (Supervised' in missing
    (wrong,) = problems_of(tmp_path, '\njob = "stf"')
    assert wrong == 'run.toml:2: job must be one of "rl", "sft"; got "stf"; did you mean "sft"?'


def test_syntax_errors_have_a_line(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, 'job = "rl"\nname demo\n')
    assert problem.startswith("run.toml:2: not valid TOML: Expected '=' after a key")
    (problem,) = problems_of(tmp_path, 'job = "rl"\nname = [1,\n')
    assert problem.startswith("run.toml:2: not valid TOML")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no such configuration file; looked at {tmp_path}/none.toml"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "latin.toml")


def test_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        RL,
        *("--learners.lr=1e-5", "--mode=sync", "--generators.temperature", "0.7", "--learners.betas=[0.8, 0.9]"),
        *("--data.train=other/file.jsonl", "--name=2026", '--runs_dir="quoted"', "--learners.lr", "2e-5"),
    )
    assert (config.learners.lr, config.mode, config.generators.temperature) == (2e-5, "sync", 0.7)
    assert (config.learners.betas, config.data.train) == ((0.8, 0.9), "other/file.jsonl")
    assert (config.name, config.runs_dir) == ("2026", "quoted")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--learners.learning_rate=1", "(command line): [learners] unknown key 'learning_rate'; did you mean 'lr'?"),
        ("--learners.num=1", "(command line): [learners] unknown key 'num'; did you mean 'num_ranks'?"),
        ("--learners.lrate=1", "(command line): [learners] unknown key 'lrate'; did you mean 'lr'?"),
        ("--eval.samples=1", "(command line): [eval] unknown key 'samples'; did you mean 'samples_per_prompt'?"),
        ("--lerners.lr=1", "(command line): unknown section [lerners]; did you mean [learners]?"),
        ("--lr=1", "(command line): unknown key 'lr'; did you mean 'lr' of [learners]?"),
        ("--learners.lr", "(command line): --learners.lr has no value; write --learners.lr=VALUE"),
        ("learners.lr=1", "(command line): unexpected 'learners.lr=1'; a setting is written --section.key=value"),
        ("--learners.lr=fast", '(command line): [learners] lr must be a number > 0; got "fast"'),
        ("--learners=3", "(command line): [learners] must be a section of keys; got 3"),
        ("--steps.x=3", '(command line): steps must be an integer > 0; got {"x": 3}'),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, expected: str) -> None:
    assert problems_of(tmp_path, RL, override) == [expected]


def test_key_lines_of_every_way_to_write_a_key() -> None:
    text = '''# comment = 1
a = "x = 1 # no" # c = 2
b.c = """
d = 4
\\""" e = 5 """"
[t] # header
"quoted key" = 1
u = { v = 1, w.x = [1, { y = 2 }], 'z' = "}" }
list = [ # f = 1
  "]", 2,
]
[t.sub]
k = 1979-05-27 07:32:00
[[many]]
n = 1
[many.deep]
o = 2
[ last . "one" ]
p = '\\'
q = 1'''
    assert key_lines(text) == {
        ("a",): 2,
        ("b",): 3,
        ("b", "c"): 3,
        ("t",): 6,
        ("t", "quoted key"): 7,
        ("t", "u"): 8,
        ("t", "u", "v"): 8,
        ("t", "u", "w"): 8,
        ("t", "u", "w", "x"): 8,
        ("t", "u", "z"): 8,
        ("t", "list"): 9,
        ("t", "sub"): 12,
        ("t", "sub", "k"): 13,
        ("last",): 18,
        ("last", "one"): 18,
        ("last", "one", "p"): 19,
        ("last", "one", "q"): 20,
    }
    assert key_lines("") == {} and key_lines("a = 1\r\nb = 2\r\n") == {("a",): 1, ("b",): 2}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lrr", "lr"),
        ("max_new_token", "max_new_tokens"),
        ("numRanks", "num_ranks"),
        ("ranks_num", "num_ranks"),
        ("learning_rate", "lr"),
        ("warmup", "warmup_steps"),
        ("qqq", None),
    ],
)
def test_nearest_name(written: str, meant: str | None) -> None:
    assert nearest(written, ["num_ranks", "lr", "warmup_steps", "max_new_tokens"]) == meant


def test_help_lists_every_key() -> None:
    text = config_help()
    for model in JOBS.values():
        for name, field in model.model_fields.items():
            section = section_of(field)
            assert name == "job" or (f"[{name}]" if section else f"  {name}  (") in text
            for key in section.model_fields if section else ():
                assert f"  {key}  (" in text
    assert "lr  (a number > 0; default 1e-06)\n      Peak learning rate of AdamW." in text


def _value(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Values that a field accepts, from its annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(arguments[0], list(annotation.__metadata__))
    if origin in (Union, types.UnionType):
        return st.none() | _value(next(a for a in arguments if a is not type(None)), metadata)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.tuples(*(_value(a, metadata) for a in arguments))
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        named = any(getattr(m, "pattern", None) for m in metadata)
        return st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z") if named else st.text(max_size=20)
    bounds = [c for m in metadata for c in getattr(m, "metadata", [m])]
    low = next((c.gt if isinstance(c, Gt) else c.ge for c in bounds if isinstance(c, Gt | Ge)), 0)
    high = next((c.lt if isinstance(c, Lt) else c.le for c in bounds if isinstance(c, Lt | Le)), None)
    if annotation is int:
        return st.integers(min_value=low + any(isinstance(c, Gt) for c in bounds), max_value=2**31)
    exclude_low, exclude_high = (any(isinstance(c, kind) for c in bounds) for kind in (Gt, Lt))
    floats = st.floats(low, high, exclude_min=exclude_low, exclude_max=exclude_high, allow_infinity=False)
    return floats.filter(lambda value: value >= 0)


def _section(model: type) -> st.SearchStrategy[dict[str, Any]]:
    fixed = {
        n: _section(s) if (s := section_of(f)) else _value(f.annotation, f.metadata)
        for n, f in model.model_fields.items()
    }
    return st.fixed_dictionaries(fixed)


def _valid(values: dict[str, Any]) -> JobConfig | None:
    """Values made to fit each other."""
    if values["job"] == "rl":
        values["algorithm"] |= {"groups_per_step": 12, "num_minibatches": 3, "group_size": 8}
        values["generators"]["max_concurrent_rollouts"] = 8 + values["seed"] % 100
        on_disk = values["buffer"]["durability"] != "memory"
        values["buffer"] |= {"memory_gb": None} if on_disk else {"keep": False}
        values["buffer"] |= {"stale": "drop", "max_uses": 1}
        if values["mode"] == "sync":
            values["buffer"] |= {"stale": "pace", "sampling": "fifo"}
    values["learners"]["num_ranks"] = 2
    if values["job"] == "sft":
        values["batch_size"] *= 2
    return JOBS[values["job"]].model_validate(values)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(values=_section(RLConfig) | _section(SFTConfig))
def test_resolved_toml_reads_back_to_the_same_configuration(tmp_path: Path, values: dict[str, Any]) -> None:
    config = _valid(values)
    (tmp_path / "resolved.toml").write_text(resolved_toml(config), encoding="utf-8", newline="")
    assert load_config(tmp_path / "resolved.toml") == config
