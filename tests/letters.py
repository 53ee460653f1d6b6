"""A tokenizer that needs no files."""

from __future__ import annotations


class Letters:
    """A tokenizer of characters."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(index) for index in ids)
