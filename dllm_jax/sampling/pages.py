"""Pages of the key/value cache: who holds which. Host side, no arrays.

A page is a run of positions of one sequence. Under block attention the keys of a page
that is whole depend on the tokens up to its end and on nothing else, so sequences that
begin alike share it: a page is known by the hash of all tokens up to its end. What
nobody holds any more stays known until its place is needed, oldest first.
"""

import collections
import hashlib

import numpy as np


class Pages:
    """Counts the holders of each of `count` pages, and knows what some contain."""

    def __init__(self, count: int):
        self.holders = [0] * count
        self.free = list(range(count))[::-1]  # nobody's, with nothing that is known
        self.idle = collections.OrderedDict()  # known, held by nobody; oldest first
        self.page_of: dict[bytes, int] = {}
        self.name_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """How many pages `take` could give."""
        return len(self.free) + len(self.idle)

    def take(self, count: int) -> list[int] | None:
        """Returns `count` pages for the caller to fill, or None if there are fewer."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if not self.free:
                page, _ = self.idle.popitem(last=False)
                self.forget(page)
            else:
                page = self.free.pop()
            self.holders[page] = 1
            taken.append(page)
        return taken

    def share(self, name: bytes) -> int | None:
        """Returns the page of that name with one holder more, or None."""
        page = self.page_of.get(name)
        if page is not None:
            self.holders[page] += 1
            self.idle.pop(page, None)
        return page

    def count_known(self, names: list[bytes]) -> int:
        """Returns how many of these pages `share` would find."""
        return len([name for name in names if name in self.page_of])

    def publish(self, page: int, name: bytes):
        """Makes a filled page known; the first of two of the same name wins."""
        if name not in self.page_of and page not in self.name_of:
            self.page_of[name], self.name_of[page] = page, name

    def release(self, pages: list[int]):
        """Gives pages back: one holder less each."""
        for page in pages:
            if self.holders[page] <= 0:
                raise RuntimeError(f"page {page} is released and nobody holds it")
            self.holders[page] -= 1
            if self.holders[page] == 0:
                if page in self.name_of:
                    self.idle[page] = None
                else:
                    self.free.append(page)

    def forget(self, page: int):
        """Drops what is known of a page."""
        del self.page_of[self.name_of.pop(page)]

    def clear(self):
        """Drops what is known of every page: new weights make other keys."""
        for page in list(self.name_of):
            self.forget(page)
        self.free += self.idle
        self.idle.clear()


def page_names(tokens, size: int, images: tuple[str, ...] = ()) -> list[bytes]:
    """Returns the name of each page of `size` positions; the last may be ragged.

    Equal names, equal tokens: from position 0 to the page's end. images: marks of what the
    ids behind the vocabulary stand for, which is another image in another table.
    """
    names, digest = [], hashlib.blake2b("".join(images).encode(), digest_size=16)
    for first in range(0, len(tokens), size):
        digest.update(np.asarray(tokens[first : first + size], np.int32).tobytes())
        names.append(digest.copy().digest())
    return names
