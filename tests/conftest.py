"""For all tests: those that need another kernel find one; options must be known before folders are read."""

import pytest
from hypothesis import settings
from properties import examples

settings.register_profile("beside-others", deadline=None, max_examples=examples(100))  # others use the processors, too
settings.load_profile("beside-others")

pytest_plugins = ["vm.plugin", "skips", "workers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-conformance-table",
        action="store_true",
        help="update the tables in docs (conformance, switching, doctor, kernels) with this run's results",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test-long` tries all examples of the tests that hypothesis runs."""
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker("property")
