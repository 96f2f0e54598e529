"""The tokenizer of the test models: one token per word, digit and mark, bytes for everything else."""

import string

from recall_text import sentence_starts, vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space
# The BOS token is part of the template, as in SmolLM2: encode its result with add_special_tokens=False.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] }}{{ eos_token }}{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    """A unigram tokenizer over whole words with byte fallback: any UTF-8 text encodes, and decodes to itself."""
    marks = [".", "?", ":", "\n", *string.digits]
    words = [*(SPACE + piece for piece in (*vocabulary(), *string.digits)), *marks, *sentence_starts(), SPACE]
    pieces = [(piece, 0.0) for piece in SPECIAL]
    pieces += [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    pieces += [(word, -1.0) for word in words]  # equal scores: the split with the fewest pieces wins
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE if chat else None,
        clean_up_tokenization_spaces=False,
    )
