"""Stop strings over streamed text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Released:
    """Text that may be sent. `stopped`: a stop string was met and nothing follows."""

    text: str
    stopped: bool = False


class StopMatcher:
    """Lets text through up to the first stop string to be complete; holds back only what may become one.

    The result does not depend on how the text is cut into pieces: the string completed by the earliest
    character wins, and of those completed by the same character the longest. The text is cut before it, or
    after it where `include` is set. One Knuth-Morris-Pratt automaton for each string keeps the cost linear.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        self._automata = [_Automaton(text) for text in sorted(stop, key=len, reverse=True)]
        self._include = include
        self._held = ""

    def push(self, text: str) -> Released:
        """Takes in new text. After a match the matcher is spent."""
        if not self._automata:
            return Released(text)
        held = len(self._held)
        buffer = self._held + text
        for index, character in enumerate(text):
            for automaton in self._automata:
                if automaton.step(character):
                    end = held + index + 1
                    self._held = ""
                    return Released(
                        buffer[: end if self._include else end - len(automaton.text)], stopped=True
                    )
        keep = max(automaton.matched for automaton in self._automata)
        self._held = buffer[len(buffer) - keep :]
        return Released(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """What was held back; the text is over and no stop string came true."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of `text` the characters seen so far end with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # longest proper prefix that is also an end of text[: i + 1]
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            length += text[index] == text[length]
            self._fallback[index] = length

    def step(self, character: str) -> bool:
        """Takes in a character. True where it completes the text."""
        matched = self.matched
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        self.matched = matched + (self.text[matched] == character)
        return self.matched == len(self.text)
