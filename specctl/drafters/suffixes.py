"""Where the end of a growing text occurred before: its longest suffix that did, and the latest place.

A suffix automaton, built online (Blumer et al. 1985): memory is linear in the text, however long the suffixes are that
are asked for, and a token takes constant time on average. A state stands for all strings that end at the same places
of the text; its link leads to that of its longest suffix that ends elsewhere too. The link of the whole text's state is
therefore the longest suffix that occurred before.

The latest place of a state changes with every token that has it on its way along the links to the root. So that a token
need not visit them all, the tree of links is cut into paths downwards. A token passes a path from some state of it up
to its top, which is noted as one stamp: it replaces those of shorter strings, and the ones left are older and of longer
strings. Few paths are crossed: one or two in a text that repeats itself, about the logarithm of the text's length in
others, never more than the longest suffix has tokens.
Knows nothing about drafting.
"""

from collections.abc import Iterable


class Suffixes:
    """The suffixes, of `longest` tokens at most, of a text that only grows."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._num_tokens = 0
        self._last = 0  # the state of the whole text; 0 is the root, the empty string, and on no path
        # Of each state:
        self._length = [0]  # of its longest string
        self._link = [-1]
        self._next: list[dict[int, int]] = [{}]  # token -> state
        self._path = [-1]
        self._stamped = [0]  # as a stamp: where the text ended then, ...
        self._older = [-1]  # ... and the state that is the next stamp of the path, older and of longer strings
        # Of each path:
        self._bottom: list[int] = []  # its state of the longest strings
        self._above: list[int] = []  # the state that its top links to
        self._entry: list[int] = []  # the way up from here enters the path that holds `longest` at this state; 0: here
        self._newest: list[int] = []  # the state that is its newest stamp, or -1

    def __len__(self) -> int:
        """The number of tokens of the text."""
        return self._num_tokens

    def latest(self) -> tuple[int, int]:
        """The length of the longest suffix that occurred before, and where the latest earlier occurrence ends.

        The end is the index of the token after it. (0, 0) where no suffix did.
        """
        repeated = self._link[self._last]
        if repeated <= 0:
            return 0, 0
        size, path = min(self._length[repeated], self._longest), self._path[repeated]
        if entry := self._entry[path]:
            path = self._path[entry]
        stamp = self._newest[path]
        while self._length[stamp] < size:  # those that are passed here the next token takes away
            stamp = self._older[stamp]
        return size, self._stamped[stamp]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the end of the text."""
        length, link, transitions, paths, bottom = self._length, self._link, self._next, self._path, self._bottom
        for token_id in token_ids:
            self._stamp()
            # 1. The new text's state: every suffix of the text so far goes on to it that never went on with this token.
            self._num_tokens += 1
            state, whole = self._last, len(length)
            self._last = whole
            self._add_state(self._num_tokens, {})
            while state >= 0 and token_id not in transitions[state]:
                transitions[state][token_id] = whole
                state = link[state]
            # 2. The longest that did is what repeats; its state may hold longer strings, which do not end here.
            repeated = 0
            if state >= 0:
                repeated = transitions[state][token_id]
                if length[repeated] > length[state] + 1:
                    repeated = self._part(repeated, state, token_id)
            link[whole] = repeated
            # 3. The new state goes on the path of the one that it links to, if that is the bottom, or begins another.
            path = paths[repeated]
            if repeated and bottom[path] == repeated:
                bottom[path] = whole
                paths[whole] = path
            else:
                paths[whole] = len(bottom)
                bottom.append(whole)
                self._above.append(repeated)
                self._entry.append((self._entry[path] or repeated) if length[repeated] >= self._longest else 0)
                self._newest.append(-1)

    def _stamp(self) -> None:
        """Note on every path up from the whole text's state that its suffixes end here."""
        state = self._last
        if not state:
            return
        length, path, older, newest = self._length, self._path, self._older, self._newest
        state = self._entry[path[state]] or state
        while state:
            here, size = path[state], length[state]
            stamp = newest[here]
            while stamp >= 0 and length[stamp] <= size:
                stamp = older[stamp]
            older[state], newest[here] = stamp, state
            self._stamped[state] = self._num_tokens
            state = self._above[here]

    def _part(self, longer: int, state: int, token_id: int) -> int:
        """A state of its own, between `longer` and its link, for strings that go on from `state` and up its links."""
        shorter = len(self._length)
        self._add_state(self._length[state] + 1, self._next[longer].copy())
        self._link[shorter], self._path[shorter] = self._link[longer], self._path[longer]
        self._link[longer] = shorter
        while state >= 0 and self._next[state].get(token_id) == longer:
            self._next[state][token_id] = shorter
            state = self._link[state]
        return shorter

    def _add_state(self, length: int, transitions: dict[int, int]) -> None:
        self._length.append(length)
        self._next.append(transitions)
        self._link.append(-1)
        self._path.append(-1)
        self._stamped.append(0)
        self._older.append(-1)
