"""What is taken for granted of the tiny models: mlx-vlm loads them, and what they answer depends on the picture."""

import mlx_vlm
import numpy as np
import pytest
from PIL import Image

from tests.vlm import folders


def picture(seed, size=(364, 280)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8))


@pytest.mark.parametrize("family", sorted(folders.CONFIGS))
def test_mlx_vlm_loads_it_and_it_answers_what_it_sees(family, tmp_path):
    model, processor = mlx_vlm.load(str(folders.save(family, tmp_path)))
    question = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]}]
    text = processor.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)

    def answer(seed):
        answers = mlx_vlm.stream_generate(model, processor, text, image=[picture(seed)], max_tokens=12)
        return [step.token for step in answers]

    one, another = answer(1), answer(2)
    assert one == answer(1)
    assert one != another
    assert len({*one, *another}) > 4
