"""Reads the pages that the tests look at."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "hr"}
HOSTILE = "</script><script>alert('x')</script>\"'&<b>"


class Page(HTMLParser):
    """Reads a page into lists, and refuses one whose tags do not match."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(source)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute stands twice in <{tag} {attrs}>"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag in self.raw:
            self.raw[tag].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]][-1] += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts).replace("\N{NO-BREAK SPACE}", " ")

    def having(self, class_: str) -> list[dict[str, str]]:
        return [
            attributes for _, attributes in self.elements if class_ in attributes.get("class", "").split()
        ]
