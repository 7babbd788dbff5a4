from __future__ import annotations

import logging

import pytest

from accel_trainer.core.logger import logger, main_speaks


def test_only_the_main_process_warns_and_all_report_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for is_main in (True, False):
        with main_speaks(is_main):
            logger.warning("a warning, main: %s", is_main)
            logger.error("an error, main: %s", is_main)
    logger.warning("after the run")
    assert caplog.messages == [
        "a warning, main: True",
        "an error, main: True",
        "an error, main: False",
        "after the run",
    ]


def test_a_level_that_the_user_has_set_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger.name):
        with main_speaks(True):
            logger.info("in the run")
        with main_speaks(False):
            logger.info("on another process")
        logger.info("after it")
    assert caplog.messages == ["in the run", "after it"]
