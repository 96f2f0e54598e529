"""Prompts as token ids."""

from transformers import PreTrainedTokenizerBase

from bpkv_trt.errors import InputError

ANSWER = "[[answer]]"  # stands for the assistant's answer when a template is taken apart


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

    def encode_continuation(self, text: str) -> list[int]:
        """Ids that ask a further question of a sequence that `encode_chat` or `encode_raw` began.

        With a chat template the sequence stands inside the assistant's turn (after the generation prompt, or after an
        answer whose end token was not fed): that turn is closed, `text` becomes the next user turn, and the ids end
        where the assistant begins to answer. Without one, `text` is simply what comes next.
        """
        if not self.has_chat_template:
            return self._encode(text)
        turns = [("user", "?"), ("assistant", ANSWER), ("user", text)]
        rendered = self._render([{"role": role, "content": content} for role, content in turns])
        _, found, rest = rendered.partition(ANSWER)
        if not found:
            raise InputError(
                "The model's chat template does not show earlier answers, so a further question cannot be asked of the "
                "same sequence. Use --question instead of --question-after, or --raw."
            )
        return self._encode(rest)

    def _render(self, turns: list[dict[str, str]]) -> str:
        rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
