"""Settings of Sphinx for the documentation site, which ``scripts/build_docs.py`` builds."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bide.version import VERSION

project = "bide"
author = "the bide authors"
project_copyright = "the bide authors"
version = release = VERSION
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_display_short_literal_types = True
highlight_language = "none"
suppress_warnings = [
    "misc.highlighting_failure",  # some programs in the docs have "..." where the reader's code goes
    "ref.python",  # the annotation "type" is the builtin, and not an attribute of this name
]

html_theme = "furo"
html_title = f"bide {VERSION}"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options: dict[str, Any] = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"


class Mermaid(SphinxDirective):
    """A diagram, which a local script draws in the browser."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The text of the diagram, as the script wants it."""
        text = nodes.Text("\n".join(self.content))
        return [nodes.literal_block("", "", text, classes=["mermaid"], language="none", highlight_args={})]


def add_script(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Load the script on pages with diagrams only, because it is large."""
    if tree is not None and any("mermaid" in one["classes"] for one in tree.findall(nodes.literal_block)):
        app.add_js_file("mermaid.min.js")
        app.add_js_file("diagrams.js")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and the script."""
    app.add_directive("mermaid", Mermaid)
    app.connect("html-page-context", add_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
