"""The page of headline figures is what the records say."""

from benchmarks.headlines import PAGE, page


def test_the_page_is_made_of_the_records():
  assert PAGE.read_text() == page(), "python -m benchmarks.headlines writes it"
