"""nvidia-smi's long output, XML or text, as one kind of tree; nothing in it is trusted.

XML is read by expat alone, which loads nothing from outside; a document that declares entities is
refused, and so is what is too large, too deep or has too many elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from hybrid.errors import DataError

MOST_BYTES = 16 << 20
MOST_DEPTH = 32
MOST_ELEMENTS = 400_000


@dataclass
class Node:
    """An element: a tag of the XML or a key of the text, its own text, and its children."""

    tag: str
    text: str = ""
    children: list[Node] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)

    def all(self, tag: str) -> Iterator[Node]:
        """Children of that tag."""
        return (c for c in self.children if c.tag == tag)

    def at(self, path: str) -> Node | None:
        """The first descendant at a path of tags, "pci/pci_device_id"."""
        here: Node | None = self
        for tag in path.split("/"):
            here = next(here.all(tag), None) if here else None
        return here


class _Builder:
    """Builds the tree from expat's events."""

    def __init__(self) -> None:
        self.root = Node("")
        self._open = [self.root]
        self._count = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """An element begins."""
        self._count += 1
        if len(self._open) > MOST_DEPTH or self._count > MOST_ELEMENTS:
            raise DataError("XML that is too deep or too long to be nvidia-smi's")
        node = Node(tag, attributes=attributes)
        self._open[-1].children.append(node)
        self._open.append(node)

    def end(self, tag: str) -> None:
        """An element ends."""
        self._open.pop()

    def data(self, text: str) -> None:
        """Text of the innermost element."""
        self._open[-1].text += text

    def entity(self, name: str, *rest: object) -> None:
        """No nvidia-smi declares entities; whoever does wants to blow up or to read a file."""
        raise DataError(f"XML that declares an entity ({name}) is not read")


def read_xml(data: bytes) -> Node:
    """The `nvidia_smi_log` element.

    Raises:
        DataError: not well-formed, truncated, hostile, or some other document.
    """
    if len(data) > MOST_BYTES:
        raise DataError(f"nvidia-smi output of {len(data)} bytes; at most {MOST_BYTES} are read")
    builder = _Builder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = builder.entity
    try:
        parser.Parse(data, True)
    # ValueError, LookupError: an encoding that is not known, or bytes that are not of it.
    except (expat.ExpatError, ValueError, LookupError) as e:
        raise DataError(f"not well-formed XML of nvidia-smi: {e}") from None
    log = next(builder.root.all("nvidia_smi_log"), None)
    if log is None:
        root = builder.root.children[0].tag
        raise DataError(f"XML of <{root}>, not of <nvidia_smi_log>")
    return log


_LINE = re.compile(r"^(?P<indent> *)(?P<key>\S[^:]*?)\s*(?::\s(?P<value>.*)|:)?$")
_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")


def read_text(text: str) -> Node:
    """The tree of `nvidia-smi -q`, by indentation; a part that lacks the head is one GPU's.

    Tags are the keys as printed. GPUs are children "gpu" with the attribute "id".

    Raises:
        DataError: no line is one of nvidia-smi's.
    """
    root = Node("nvidia_smi_log")
    home = root
    stack: list[tuple[int, Node]] = [(-1, root)]
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith(("#", "=", "[")):
            continue
        if found := _GPU.match(line):
            home = Node("gpu", attributes={"id": found[1]})
            root.children.append(home)
            stack = [(-1, home)]
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        if home is root and depth >= 4:
            home = Node("gpu")  # a cut-out that begins within a GPU
            root.children.append(home)
            stack = [(-1, home)]
        while stack[-1][0] >= depth:
            stack.pop()
        if len(stack) > MOST_DEPTH:
            raise DataError("text that is too deep to be nvidia-smi's")
        node = Node(match["key"], (match["value"] or "").strip())
        stack[-1][1].children.append(node)
        stack.append((depth, node))
    known = {"GPU UUID", "Product Name", "Driver Version", "PCI", "FB Memory Usage"}
    if not any(c.tag in known for top in (root, *root.all("gpu")) for c in top.children):
        raise DataError("no line that `nvidia-smi -q` prints")
    return root
