"""Log records: plain lines, lines of JSON, and what configures them."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from sagellm.core import ConfigError, get_logger
from sagellm.engines.logging import JSONFormatter, configure, fields, is_json


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    logger, others = logging.getLogger("sagellm"), logging.getLogger()
    kept, kept_others = (logger.handlers[:], logger.level, logger.propagate), others.handlers[:]
    yield logger
    logger.handlers[:], logger.level, logger.propagate = kept
    others.handlers[:] = kept_others
    logging.captureWarnings(False)


@pytest.mark.usefixtures("root_logger")
def test_records_become_json_lines_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", as_json=True)
    logger = get_logger("sagellm.test")
    try:
        raise KeyError("gone")
    except KeyError:
        logger.exception("blocks: %d", 3)
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["logger"], entry["message"]) == ("ERROR", "sagellm.test", "blocks: 3")
    assert "KeyError: 'gone'" in entry["exception"]
    assert entry["time"][10] == "T"


@pytest.mark.usefixtures("root_logger")
def test_a_line_of_json_has_the_fields_of_its_record_and_the_time_in_utc(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("info", as_json=True)
    get_logger("sagellm.test").info("done", extra=fields(request_id="a-0", tokens=3, error=None))
    entry = json.loads(capsys.readouterr().err)
    assert {"message": "done", "request_id": "a-0", "tokens": 3}.items() <= entry.items()
    assert "error" not in entry
    assert datetime.fromisoformat(entry["time"]).utcoffset() == timedelta(0)
    configure("info")
    get_logger("sagellm.test").info("done", extra=fields(request_id="a-0"))
    assert capsys.readouterr().err.endswith("INFO sagellm.test: done\n")


@pytest.mark.usefixtures("root_logger")
def test_a_log_of_json_has_other_libraries_warnings_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure("error", as_json=True)
    assert is_json()
    logging.getLogger("another.library").warning("slow")
    warnings.warn("old", stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [each["logger"] for each in lines] == ["another.library", "py.warnings"]
    configure("error")
    assert not is_json()
    assert not [each for each in logging.getLogger().handlers if isinstance(each.formatter, JSONFormatter)]


def test_a_second_configuration_replaces_the_first(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("debug", as_json=True)
    configure("warning")
    get_logger("sagellm.test").info("quiet")
    get_logger("sagellm.test").warning("loud")
    assert capsys.readouterr().err.endswith("WARNING sagellm.test: loud\n")
    assert len(root_logger.handlers) == 1
    assert getattr(root_logger.handlers[0], "stream", None) is sys.stderr


@pytest.mark.usefixtures("root_logger")
def test_the_environment_says_in_which_format_records_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("warning")
    get_logger("sagellm.test").warning("loud")
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d WARNING sagellm.test: loud\n", capsys.readouterr().err)
    monkeypatch.setenv("SAGELLM_LOG_FORMAT", "json")
    configure("warning")
    get_logger("sagellm.test").warning("loud")
    assert json.loads(capsys.readouterr().err)["message"] == "loud"
    monkeypatch.setenv("SAGELLM_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="SAGELLM_LOG_FORMAT is 'xml'; it must be plain or json"):
        configure("warning")


def test_a_level_that_is_none_is_told() -> None:
    with pytest.raises(ConfigError, match="log level 'loud'; it must be one of DEBUG"):
        configure("loud")
