"""A byte-level BPE tokenizer, trained in a fraction of a second on text of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sagellm.core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, BEGIN_TURN, END_TURN)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MAX_VOCAB_SIZE = 1024  # more than the text gives

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT = """\
The lighthouse keeper wrote one line a day, and on most days the line said only how the wind stood.
When the harbour froze, the boats were pulled ashore and the children learned to walk on the water.
A good answer to a question is short, and a better one says where it stops being true.
She counted the steps to the cellar twice: nineteen down, and for some reason twenty up again.
Bread needs flour, water, salt and time; of these four, time is the one that nobody can buy.
"Is it far?" asked the boy. "It was farther yesterday," said his grandfather, and walked on.
The clock in the station is wrong by seven minutes, and everyone in the town is late by seven.
To build a wall, lay the first row straight. The second row will believe whatever the first one says.
In the library the maps were kept by the window, because maps like to see what they describe.
The river has three names: one at the spring, one in the valley, and one where it meets the sea.
Every machine hums a note of its own. The old miller could tell by ear which wheel wanted oil.
def area(width, height): return width * height
for number in range(10): print(number, number ** 2, number % 3 == 0)
{"name": "lighthouse", "height": 31, "lamps": [1, 2, 4], "lit": true}
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday; 0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000.
Das Boot liegt im Hafen. Le bateau est au port. El barco está en el puerto.
船は港にある。 Лодка в гавани. ⚓🌊
"""


def make_tokenizer(vocab_size: int = MAX_VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a tokenizer with at most `vocab_size` tokens, all bytes among them.

    Raises ConfigError if the bytes and the special tokens alone would not fit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size is {vocab_size}; bytes and special tokens alone need {MIN_VOCAB_SIZE}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, MAX_VOCAB_SIZE),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TURN,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
