"""What the files of a run contain. Anything else is refused when it is read, before it can become a figure or a file name.

Every check raises a ``ValueError`` that says what is wrong and where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[[Any], bool]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1e300  # nan compares as False


def is_number_or_none(x: Any) -> bool:
    return x is None or is_number(x)


def is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**53


def is_name(x: Any) -> bool:
    """Whether ``x`` is a plain file name, which cannot leave its folder."""
    return isinstance(x, str) and NAME.fullmatch(x) is not None


def is_text(x: Any) -> bool:
    return isinstance(x, str) and all(c.isprintable() or c in "\n\t" for c in x)


def is_setting(x: Any) -> bool:
    return isinstance(x, bool) or is_number(x) or is_text(x) or (isinstance(x, (list, tuple)) and all(map(is_text, x)))


def one_of(names: Iterable[str]) -> Test:
    known = {*names}
    return lambda x: isinstance(x, str) and x in known


def check(value: Any, where: str, /, **tests: Test) -> None:
    """``value`` must be a dictionary with these keys, each of which passes its test."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.60}, not a dictionary")
    for key, test in tests.items():
        if key not in value:
            raise ValueError(f"{where} has no {key!r}")
        if not test(value[key]):
            raise ValueError(f"{key!r} of {where} is {value[key]!r:.60}")


def check_all(value: Any, where: str, test: Test) -> None:
    """``value`` must be a dictionary whose keys are text and whose values pass the test."""
    check(value, where, **{})
    for key, x in value.items():
        if not is_text(key) or not test(x):
            raise ValueError(f"{key!r:.60} of {where} is {x!r:.60}")


def check_config(config: Any) -> None:
    """A config.json."""
    check(config, "it", task=is_name, loss=is_name, seed=is_count)
    settings = config.get("settings")
    check(settings, "'settings'", lr=is_number, epochs=is_count, monitor=one_of(("error", "loss", "nll")))
    check_all(settings, "'settings'", is_setting)


def check_environment(environment: Any) -> None:
    """An environment.json."""
    check(environment, "it", python=is_text, machine=is_text, cpu_capability=is_text, threads=is_count)
    check_all(environment.get("versions"), "'versions'", is_text)


def of_language(settings: dict[str, Any]) -> bool:
    """Whether these are settings of a language model."""
    return "context" in settings


def check_metrics(metrics: Any, where: str, language: bool) -> None:
    """Metrics of a data set: at least those that the tables of such a task show."""
    shown = ("nll", "perplexity", "top10") if language else ("nll",)
    check(metrics, where, loss=is_number, error=is_number, **dict.fromkeys(shown, is_number_or_none))
    check_all(metrics, where, is_number_or_none)


def check_result(result: Any, language: bool) -> None:
    """A result.json."""
    check(result, "it", status=one_of(("finished", "diverged")))
    if result["status"] == "diverged":
        check(result, "it", epoch=is_count, reason=is_text)
        return
    check(result, "it", best_epoch=is_count, epochs=is_count, seconds_per_epoch=is_number, seconds_to_best=is_number)
    for part in ("valid", "test", *({"start"} & {*result})):
        check_metrics(result.get(part), repr(part), language)
    if "data" in result:
        check_all(result["data"], "'data'", is_count)


def check_history(history: Any, language: bool) -> None:
    """The records of a metrics.jsonl."""
    if not isinstance(history, list):
        raise ValueError(f"it is {history!r:.60}, not a list of epochs")
    for number, record in enumerate(history, 1):
        where = f"epoch {number}"
        numbers = dict.fromkeys(("lr", "train_loss", "seconds", "train_seconds"), is_number)
        check(record, where, epoch=is_count, **numbers)
        check_metrics(record.get("valid"), f"'valid' of {where}", language)
        if record["epoch"] != number:
            raise ValueError(f"{where} says that it is epoch {record['epoch']}")
        if record.keys() != history[0].keys() or record["valid"].keys() != history[0]["valid"].keys():
            raise ValueError(f"{where} does not have the keys of the first")


def check_study(study: Any) -> None:
    """A line of a tuning study."""
    check(study, "it", name=is_name, task=is_name, loss=is_name, monitor=is_text)
    check_all(study.get("settings"), "'settings'", is_setting)
    if not isinstance(study.get("trials"), list):
        raise ValueError(f"'trials' is {study.get('trials')!r:.60}, not a list")
    for trial in study["trials"]:
        check(trial, "a trial", number=is_count, value=is_number_or_none)
        check_all(trial.get("values"), f"'values' of trial {trial['number']}", is_number)
        if "pruned" in trial:
            check(trial, f"trial {trial['number']}", pruned=is_count)
