"""Reports: facts of compiled programs, estimates and the search; text, pictures and pages of them."""

# The types of reports do not know their text, pages and pictures, which register themselves.
from nnx_parallel.report import figures as figures
from nnx_parallel.report import html as html
