"""Reward functions in their processes: what works, and what a bad one costs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RewardConfig
from asyncrl.errors import RewardError
from asyncrl.rewards import Score, Scorer, exact_match, last_number, load_function
from asyncrl.rewards.loading import Signature, check_signature, read_signature
from asyncrl.types import Prompt

REWARDS = """
import asyncio, os, sys, time
import numpy as np
import helper

def good(prompt, completion, answer): return helper.half(completion == answer) * 2
def parts(completion): return {"length": len(completion), "flag": True, "bonus": np.float32(0.5)}
def everything(**columns): return {name: len(str(value)) for name, value in columns.items()}
def optional(completion, answer, scale=3.0): return scale
async def slow_but_async(completion):
    await asyncio.sleep(0.01)
    return 0.25

def raises(completion): return {}["no such key"]
async def raises_async(completion): raise ValueError("from a coroutine")
def hangs(completion):
    if completion == "hang": time.sleep(1000)
    return 1.0
def hangs_with_a_child(completion):
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    open(completion, "w").write(str(child.pid))
    child.wait()
def returns(completion): return eval(completion, {"np": np})
def crashes(completion):
    if completion == "crash": os._exit(3)
    if completion == "segfault": os.kill(os.getpid(), 11)
    if completion == "exit": sys.exit("bye")
    return 1.0
def hungry(completion):
    if completion: return float(len(bytearray(int(completion))) > 0)
    return 1.0
def prints(completion):
    print("x" * 3_000_000); print('{"reward": 99, "parts": {}}')
    os.write(1, b'{"reward": 99, "parts": {}}\\n'); sys.stderr.write("y" * 1000)
    return 1.0
def reads_stdin(completion): return float(len(sys.stdin.read()))
def pid(completion): return os.getpid()
not_callable = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "helper.py").write_text("def half(x): return x / 2\n")
    (folder / "my_reward.py").write_text(REWARDS)
    return folder / "my_reward.py"


def prompt(**columns: Any) -> Prompt:
    return Prompt("rows.jsonl:1", [1], "1+1=", {"prompt": "raw", "answer": "2", **columns})


def score_all(function: str, completions: list[str], **settings: Any) -> list[Score | RewardError]:
    """Scores of completions, one after another with one process; errors are returned in place."""

    async def run() -> list[Score | RewardError]:
        scorer = Scorer(RewardConfig(function=function, **settings))
        await scorer.start()
        try:
            return [await attempt(scorer, completion) for completion in completions]
        finally:
            await scorer.close()

    async def attempt(scorer: Scorer, completion: str) -> Score | RewardError:
        try:
            return await scorer.score(prompt(), completion)
        except RewardError as error:
            return error

    return asyncio.run(run())


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("good", Score(1.0, {})),
        ("parts", Score(2.5, {"length": 1.0, "flag": 1.0, "bonus": 0.5})),
        ("everything", Score(6.0, {"prompt": 4.0, "answer": 1.0, "completion": 1.0})),
        ("optional", Score(3.0, {})),
        ("slow_but_async", Score(0.25, {})),
    ],
)
def test_good_functions(file: Path, name: str, expected: Score) -> None:
    assert score_all(f"{file}:{name}", ["2", "2"]) == [expected, expected]


def test_ready_made_by_module_name() -> None:
    assert score_all("asyncrl.rewards:exact_match", [" 2\n", "3"]) == [Score(1.0, {}), Score(0.0, {})]
    assert exact_match("2", answer="2 ") == 1.0
    assert (last_number("1 and -1,234.50."), last_number("none")) == (-1234.5, None)


def test_relative_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent.parent)
    assert score_all(f"{file.parent.name}/my_reward.py:good", ["2"]) == [Score(1.0, {})]


def test_raising_shows_the_users_lines_only(file: Path) -> None:
    error, other = score_all(f"{file}:raises", ["1"]) + score_all(f"{file}:raises_async", ["1"])
    message = str(error)
    assert message.startswith(f"[reward] {file}:raises raised KeyError: 'no such key'\n")
    line = REWARDS.splitlines().index('def raises(completion): return {}["no such key"]') + 1
    assert f'File "{file}", line {line}, in raises' in message and "worker.py" not in message
    assert "raised ValueError: from a coroutine" in str(other) and "asyncio" not in str(other)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("None", "returned None (NoneType)"),
        ("'1.0'", "returned '1.0' (str)"),
        ("float('nan')", "returned nan (float)"),
        ("float('inf')", "returned inf (float)"),
        ("1e39", "returned 1e+39 (float)"),
        ("10**400", "returned 1000"),
        ("np.float64('nan')", "returned np.float64(nan) (float64)"),
        ("np.ones(2)", "returned array([1., 1.]) (ndarray)"),
        ("[1.0]", "returned [1.0] (list)"),
        ("1j", "returned 1j (complex)"),
        ("{}", "returned {} (dict)"),
        ("{1: 2}", "returned {1: 2} (dict)"),
        ("{'a': 1, 'b': None}", "returned {'a': 1, 'b': None} (dict)"),
        ("{'a': 3e38, 'b': 3e38}", "returned {'a': 3e+38, 'b': 3e+38} (dict)"),
    ],
)
def test_what_is_not_a_reward(file: Path, returned: str, shown: str) -> None:
    error, good = score_all(f"{file}:returns", [returned, "np.int64(3)"])
    assert f"{file}:returns {shown}" in str(error)
    assert str(error).endswith("; accepted: a finite number, or a dict of name -> finite number")
    assert good == Score(3.0, {})


def test_a_hang_costs_its_call_only(file: Path) -> None:
    begin = time.monotonic()
    error, good = score_all(f"{file}:hangs", ["hang", "ok"], timeout_s=0.3)
    assert str(error) == f"[reward] {file}:hangs took too long: the call was ended after 0.3 s ([reward] timeout_s)"
    assert good == Score(1.0, {}) and time.monotonic() - begin < 10


def test_a_hang_takes_its_children_along(file: Path, tmp_path: Path) -> None:
    (error,) = score_all(f"{file}:hangs_with_a_child", [str(tmp_path / "pid")], timeout_s=1.0)
    assert "took too long" in str(error)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("crash", "ended its process during the call (exit status 3)"),
        (
            "segfault",
            "ended its process during the call (signal 11, SIGSEGV; out of memory, or a crash in native code)",
        ),
        ("exit", "raised SystemExit: bye"),
    ],
)
def test_a_crash_costs_its_call_only(file: Path, how: str, expected: str) -> None:
    error, good = score_all(f"{file}:crashes", [how, "ok"])
    assert expected in str(error)
    assert good == Score(1.0, {})


def test_memory_is_limited(file: Path) -> None:
    error, good = score_all(f"{file}:hungry", [str(2 * 2**30), ""], memory_limit_mb=1024)
    assert str(error) == f"[reward] {file}:hungry needed more memory than [reward] memory_limit_mb = 1024 allows"
    assert good == Score(1.0, {})


def test_prints_and_input_do_not_disturb(file: Path) -> None:
    assert score_all(f"{file}:prints", ["1", "2"]) == [Score(1.0, {})] * 2
    assert score_all(f"{file}:reads_stdin", ["1"]) == [Score(0.0, {})]


def test_long_and_unusual_texts(file: Path) -> None:
    texts = ["\u2028\n\r\x00\U0001f600 " * 3, "z" * 2_000_000]
    lengths = [len(text) for text in texts]
    scores = score_all(f"{file}:parts", texts)
    assert [score.parts["length"] for score in scores if isinstance(score, Score)] == lengths


def test_processes_work_side_by_side_and_none_is_left(file: Path) -> None:
    async def run() -> set[int]:
        scorer = Scorer(RewardConfig(function=f"{file}:pid", num_workers=2))
        await scorer.start()
        scores = await asyncio.gather(*(scorer.score(prompt(), "") for _ in range(20)))
        await scorer.close()
        with pytest.raises(RewardError, match="the scorer is closed"):
            await scorer.score(prompt(), "")
        return {int(score.reward) for score in scores}

    pids = asyncio.run(run())
    assert len(pids) == 2 and not any(map(is_alive, pids))


def test_closing_ends_calls_in_flight(file: Path) -> None:
    async def run() -> list[Any]:
        scorer = Scorer(RewardConfig(function=f"{file}:hangs", timeout_s=60))
        await scorer.start()
        calls = [asyncio.create_task(scorer.score(prompt(), "hang")) for _ in range(3)]
        await asyncio.sleep(0)
        await scorer.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [str(result) for result in asyncio.run(run())] == ["the scorer is closed"] * 3


def test_a_cancelled_call_leaves_no_answer_behind(file: Path) -> None:
    async def run() -> Score:
        scorer = Scorer(RewardConfig(function=f"{file}:hangs"))
        await scorer.start()
        call = asyncio.create_task(scorer.score(prompt(), "hang"))
        while not call.done():
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call}, timeout=1)
        try:
            return await scorer.score(prompt(), "ok")
        finally:
            await scorer.close()

    assert asyncio.run(run()) == Score(1.0, {})


def test_processes_end_when_their_parent_is_killed(file: Path, tmp_path: Path) -> None:
    code = f"""
import asyncio
from asyncrl.config import RewardConfig
from asyncrl.rewards import Scorer
from asyncrl.types import Prompt
async def run():
    scorer = Scorer(RewardConfig(function={f"{file}:pid"!r}))
    await scorer.start()
    print(int((await scorer.score(Prompt("a:1", [1], "p", {{}}), "")).reward), flush=True)
    await asyncio.sleep(1000)
asyncio.run(run())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert is_alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(worker))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("{file}:god", "has no function 'god'; did you mean 'good'?"),
        ("{file}:not_callable", "is of type int, not a function"),
        ("{folder}/my_rewards.py:good", "no file {folder}/my_rewards.py; did you mean 'my_reward.py'?"),
        ("{folder}/broken.py:f", "importing {folder}/broken.py:f raised ZeroDivisionError"),
        ("{folder}/syntax.py:f", "raised SyntaxError"),
        ("{folder}/leaves.py:f", "raised SystemExit: 0"),
        ("{folder}/dies.py:f", "ended its process during importing it (exit status 4)"),
        ("{folder}/needs.py:f", "raised ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("{folder}/slash.py:f", "parameter 'completion' is positional-only"),
        ("no_such_module:f", "no module 'no_such_module' can be imported from"),
        ("asyncrl.no_such:f", "no module 'asyncrl.no_such' can be imported"),
        ("good", 'must be "module:name" or "path/file.py:name"; got \'good\''),
    ],
)
def test_functions_that_cannot_be_imported(file: Path, function: str, expected: str) -> None:
    folder = file.parent
    (folder / "broken.py").write_text("x = 1 / 0\n")
    (folder / "syntax.py").write_text("def f(:\n")
    (folder / "leaves.py").write_text("raise SystemExit(0)\n")
    (folder / "dies.py").write_text("import os\nos._exit(4)\n")
    (folder / "needs.py").write_text("import surely_not_installed\n")
    (folder / "slash.py").write_text("def f(completion, /): return 1\n")
    with pytest.raises(RewardError) as caught:
        score_all(function.format(file=file, folder=folder), [""])
    assert expected.format(file=file, folder=folder) in str(caught.value)
    assert str(caught.value).startswith("[reward] ")


def test_signature_against_columns() -> None:
    def function(completion: str, anser: str, level: int, *, scale: float = 1.0) -> float: ...

    signature = read_signature(function)
    assert signature == Signature(("completion", "anser", "level"), ("scale",), takes_all=False)
    with pytest.raises(RewardError) as caught:
        check_signature(signature, function="r.py:function", columns=["prompt", "answer"], source="rows.jsonl")
    assert str(caught.value) == (
        "[reward] r.py:function takes 'anser', 'level', but a reward function gets prompt, completion and the columns "
        "of rows.jsonl: prompt, answer; did you mean 'anser' -> 'answer'?"
    )
    check_signature(signature, function="f", columns=["anser", "level"], source="rows.jsonl")
    check_signature(read_signature(lambda **rest: 1.0), function="f", columns=[], source="rows.jsonl")


def test_load_function_in_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_function(f"{file}:parts")("abc")["length"] == 3
    assert load_function("os.path:basename") is os.path.basename


def test_a_reward_process_starts_light() -> None:
    code = "import sys, asyncrl.rewards.worker; print({'torch', 'numpy', 'pydantic', 'ray'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
