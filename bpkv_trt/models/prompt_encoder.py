"""Prompts as token ids, and answers as text."""

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from bpkv_trt.errors import InputError, ModelError
from bpkv_trt.models.conversation import Turn
from bpkv_trt.models.failure import told
from bpkv_trt.models.fewest_tokens import FewestTokens

GAP = "[[gap]]"  # stands for a turn's content when a template is taken apart
MEND_TEMPLATE = (
    "Mend it, in chat_template.jinja or under chat_template in tokenizer_config.json, or do without it: "
    "`bpkv generate --raw`."
)


class PromptEncoder:
    """Text to token ids: through the chat template where the tokenizer has one, with one BOS at most.

    A chat template writes its own BOS, so its text is encoded without special tokens: a doubled BOS turns a good
    model's answers into nonsense. Any number of threads may use one at once: nothing that is called here changes how
    the tokenizer pads or truncates, which alone is kept in it, and fast ones encode without Python's lock.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, always_bos: bool = False) -> None:
        self._tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
        self.adds_bos = bos is not None and (always_bos or with_special[:1] == [bos])
        self.has_chat_template = tokenizer.chat_template is not None

    def encode(
        self,
        text: str,
        question: str | None = None,
        question_after: str | None = None,
        *,
        raw: bool = False,
        most_tokens: int | None = None,
    ) -> list[list[int]]:
        """Ids of a prompt, in the parts that are encoded one after the other, up to where the answer begins.

        `question` follows the text after an empty line. `question_after` does too, but as a part of its own: with a
        chat template both parts make up one user turn, cut before the question (after an empty answer of the
        assistant many models say nothing more, within the same turn they answer). InputError where a template does
        not show the user's text as it is, or where it is certain before it is encoded that the first part has more than
        `most_tokens`, which may take seconds to find out; ModelError where it fails or leaves the text out.
        """
        content = text if question is None else f"{text}\n\n{question}"
        if raw or not self.has_chat_template:
            return [
                self.encode_raw(content, most_tokens),
                *([] if question_after is None else [self.encode_further(question_after)]),
            ]
        if question_after is None:
            return [self._encode(self._render(content), most_tokens)]
        before, found, after = self._frame()
        if not found:
            raise InputError(
                "The model's chat template does not show the user's text as it is, so it cannot be cut before the "
                "question. Use --question instead of --question-after, or --raw."
            )
        return [self._encode(before + content, most_tokens), self._encode(f"\n\n{question_after}{after}")]

    def encode_turns(self, turns: Sequence[Turn], *, most_tokens: int | None = None) -> list[int]:
        """Ids of a conversation, up to where its next answer begins.

        InputError where there is no chat template, or where it does not take these turns, or leaves some of them out,
        and as `encode`.
        """
        if not self.has_chat_template:
            raise InputError("The model has no chat template, so it takes no messages; give it text.")
        try:
            rendered = self._apply_template(turns)
            ignored = self._ignored_roles(turns, rendered)
        except Exception as error:
            raise InputError(
                f"The model's chat template does not take these messages ({told(error)}); give it others, or text."
            ) from error
        if ignored:
            raise InputError(
                f"The model's chat template leaves messages of the role {ignored[0]} out; give none, or text."
            )
        return self._encode(rendered, most_tokens)

    def encode_raw(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Ids of plain text, begun with BOS if the model was trained so. InputError as `encode`."""
        ids = self._encode(text, most_tokens)
        bos = self._tokenizer.bos_token_id
        return [bos, *ids] if self.adds_bos and ids[:1] != [bos] else ids

    def encode_further(self, text: str) -> list[int]:
        """Ids of text that follows another after an empty line, within the same turn."""
        return self._encode(f"\n\n{text}")

    def encode_answer_start(self) -> list[int]:
        """Ids of what leads from a user's text to the answer: the rest of the chat template, or else a line end."""
        if not self.has_chat_template:
            return self._encode("\n")
        _, found, after = self._frame()
        if not found:
            raise InputError(
                "The model's chat template does not show the user's text as it is, so it is not known how an answer "
                "begins, which scoring by repetition needs. Choose another policy."
            )
        return self._encode(after)

    def _frame(self) -> tuple[str, str, str]:
        return self._render(GAP).partition(GAP)

    def count(self, text: str) -> int:
        """Tokens of plain text, special ones not counted."""
        return len(self._encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _render(self, content: str) -> str:
        turns = [Turn(role="user", content=content)]
        try:
            rendered = self._apply_template(turns)
            ignored = self._ignored_roles(turns, rendered)
        except Exception as error:  # a template is a program: it fails in any way, some of them on purpose
            raise ModelError(f"The model's chat template fails ({told(error)}). {MEND_TEMPLATE}") from error
        if ignored:
            raise ModelError(f"The model's chat template leaves the user's text out. {MEND_TEMPLATE}")
        return rendered

    def _ignored_roles(self, turns: Sequence[Turn], rendered: str) -> list[str]:
        """Those whose turns could say anything else, and nothing else would be `rendered`."""
        roles = dict.fromkeys(turn.role for turn in turns)
        return [role for role in roles if self._apply_template([_marked(turn, role) for turn in turns]) == rendered]

    def _apply_template(self, turns: Sequence[Turn]) -> str:
        said = [turn.model_dump() for turn in turns]
        return str(self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str, most_tokens: int | None = None) -> list[int]:
        if most_tokens is not None and len(text) > most_tokens and (fewest := self._fewest_tokens(text)) > most_tokens:
            raise InputError(
                f"The prompt has {len(text)} characters, which are {fewest} tokens or more, and at most {most_tokens} "
                "can be had here. Shorten it."
            )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return ids

    @cached_property
    def _fewest_tokens(self) -> FewestTokens:
        return FewestTokens(self._tokenizer)


def _marked(turn: Turn, role: str) -> Turn:
    return Turn(role=turn.role, content=turn.content + GAP) if turn.role == role else turn
