"""A tokenizer that needs no download: every byte is a token, and ChatML's markers and roles are one each."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
VOCABULARY = 264
"""256 bytes, 3 markers and 3 roles, rounded up to a multiple of 8."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer, for sequences of at most ``max_length`` tokens."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (END_OF_TEXT, TURN_START, TURN_END)])
    tokenizer.add_tokens([AddedToken(role, special=False, normalized=False) for role in ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
    )
