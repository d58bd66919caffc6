"""The cases of tests/frameworks, their results, and the page that shows them."""

from tests.frameworks import page
from tests.frameworks.cases import read_cases
from tests.frameworks.compare import is_equal
from tests.frameworks.page import read_results


def test_the_page_is_that_of_the_results() -> None:
    text = page.FILE.read_text(encoding="utf-8")
    assert page.MARKED.search(text)
    assert page.with_table(text, read_cases(), read_results()) == text


def test_results_are_as_the_cases_say() -> None:
    """A difference without a reason, or a reason without a difference, is not what the pages may say."""
    results = read_results()
    ran = [(case, results[case.name]) for case in read_cases() if case.name in results]
    assert [case.name for case, result in ran if bool(case.differs) == is_equal(result)] == []
