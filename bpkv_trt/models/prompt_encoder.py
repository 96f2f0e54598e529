"""Prompts as token ids."""

from transformers import PreTrainedTokenizerBase

from bpkv_trt.errors import InputError

CUT = "[[cut]]"  # stands where a user turn is taken apart
GAP = "[[gap]]"  # stands for a turn's content when a template is taken apart


class PromptEncoder:
    """Text to token ids: through the chat template where the tokenizer has one, with one BOS at most.

    A chat template writes its own BOS, so its text is encoded without special tokens: a doubled BOS turns a good
    model's answers into nonsense.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, always_bos: bool = False) -> None:
        self._tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
        self.adds_bos = bos is not None and (always_bos or with_special[0] == bos)
        self.has_chat_template = tokenizer.chat_template is not None

    def encode(
        self, text: str, question: str | None = None, question_after: str | None = None, *, raw: bool = False
    ) -> list[list[int]]:
        """Ids of a prompt, in the parts that are encoded one after the other.

        `question` follows the text after an empty line. `question_after` does too, but as a part of its own: with a
        chat template both parts make up one user turn, cut before the question.
        """
        content = text if question is None else f"{text}\n\n{question}"
        chat = self.has_chat_template and not raw
        if question_after is None:
            return [self.encode_chat(content) if chat else self.encode_raw(content)]
        if not chat:
            return [self.encode_raw(content), self._encode(f"\n\n{question_after}")]
        before, _, after = self._render([{"role": "user", "content": f"{content}{CUT}{question_after}"}]).partition(CUT)
        return [self._encode(before), self._encode(f"\n\n{after}")]

    def encode_raw(self, text: str) -> list[int]:
        """Ids of plain text, begun with BOS if the model was trained so."""
        ids = self._encode(text)
        bos = self._tokenizer.bos_token_id
        return [bos, *ids] if self.adds_bos and ids[:1] != [bos] else ids

    def encode_chat(self, user_text: str, question: str | None = None) -> list[int]:
        """Ids of one user turn, up to where the assistant begins to answer; raw text without a chat template.

        `question` follows the text after an empty line.
        """
        content = user_text if question is None else f"{user_text}\n\n{question}"
        if not self.has_chat_template:
            return self.encode_raw(content)
        return self._encode(self._render([{"role": "user", "content": content}]))

    def encode_open(self, user_text: str) -> list[int]:
        """Ids of a user turn that is left open, so that `encode_continuation(..., open_turn=True)` may end it.

        For text that is compacted before its question is known: after an empty answer of the assistant many models
        say nothing more, within the same turn they answer.
        """
        if not self.has_chat_template:
            return self.encode_raw(user_text)
        before, _ = self._around([("user", GAP)])
        return self._encode(before + user_text)

    def encode_continuation(self, text: str, open_turn: bool = False) -> list[int]:
        """Ids that ask a further question of a sequence begun with one of the other methods.

        With a chat template and `open_turn` the question ends the user turn that `encode_open` left open, after an
        empty line. Without `open_turn` the sequence stands inside the assistant's turn, after an answer whose end
        token was not fed: that turn is closed and `text` becomes the next user turn. Either way the ids end where the
        assistant begins to answer. Without a chat template `text` is simply what comes next.
        """
        if not self.has_chat_template:
            return self._encode(text)
        if open_turn:
            _, after = self._around([("user", GAP)])
            return self._encode(f"\n\n{text}{after}")
        _, after = self._around([("user", "?"), ("assistant", GAP), ("user", text)])
        return self._encode(after)

    def _around(self, turns: list[tuple[str, str]]) -> tuple[str, str]:
        """What the template writes before and after the turn whose content is GAP."""
        rendered = self._render([{"role": role, "content": content} for role, content in turns])
        before, found, after = rendered.partition(GAP)
        if not found:
            raise InputError(
                "The model's chat template does not show earlier turns as they are, so a further question cannot be "
                "asked of the same sequence. Use --question instead of --question-after, or --raw."
            )
        return before, after

    def _render(self, turns: list[dict[str, str]]) -> str:
        rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
