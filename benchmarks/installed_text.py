"""Text that lies on every machine with Python: documentation, licences and source, as tokens. Needs no network.

    python benchmarks/installed_text.py --megabytes 20

Files come from the standard library, the installed packages and /usr/share/doc: English documentation first (.md, .rst,
.txt, licences, package descriptions), then Python source with its docstrings and comments, until the size asked for is
reached. Paths are relative to their folder and sorted (source by a hash of the path, so that a part is drawn from every
package), exact copies are taken once, tables of numbers and files with very long lines are left out. The same packages
therefore give the same text, and `sha256` says whether two runs had it.

Tokens are bytes merged by a BPE that is trained on a sample of the text itself, with the package `tokenizers`; where
that is missing, a token is a byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

PROSE_SUFFIXES = (".md", ".rst", ".txt")
PROSE_NAMES = ("copying", "copyright", "licence", "license", "metadata", "notice", "readme")
SYSTEM_FOLDERS = ("/usr/share/doc", "/usr/share/common-licenses", "/usr/lib/python3/dist-packages")
SMALLEST, LARGEST, LONGEST_LINE = 500, 1_000_000, 2_000  # bytes
LEAST_LETTERS = 0.6  # letters and white space among the bytes; tables of numbers have fewer
SAMPLE_BYTES = 20_000_000  # that the BPE is trained on
END = "<|endoftext|>"
_LETTERS = bytes(code for code in range(128) if chr(code).isalpha() or chr(code).isspace())


@dataclass(frozen=True)
class Facts:
    """What the text is."""

    files: int
    prose_bytes: int
    source_bytes: int
    sha256: str
    tokenizer: str
    tokens: int
    tokens_sha256: str

    def __str__(self) -> str:
        return (
            f"{self.files:,} files, {self.prose_bytes / 1e6:.1f} MB of documentation and {self.source_bytes / 1e6:.1f} "
            f"MB of Python source, sha256 {self.sha256[:16]}; {self.tokenizer}: {self.tokens:,} tokens, sha256 "
            f"{self.tokens_sha256[:16]}"
        )


def load(megabytes: float, vocabulary: int) -> tuple[Tensor, Facts]:
    """Tokens (int32, one dimension, files divided by an end token) of at most that much text, and what it is.

    Raises RuntimeError if there is less than a third of the text asked for.
    """
    limit = int(megabytes * 1e6)
    prose, source = _collect(limit)
    sizes = sum(map(len, prose)), sum(map(len, source))
    if sum(sizes) < limit / 3:
        raise RuntimeError(f"found {sum(sizes) / 1e6:.1f} MB of text, and {megabytes:g} MB were asked for")
    texts = prose + source
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    tokens, tokenizer = _tokenize(texts, vocabulary)
    hashed = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    return tokens, Facts(len(texts), *sizes, digest.hexdigest(), tokenizer, len(tokens), hashed)


def _collect(limit: int) -> tuple[list[bytes], list[bytes]]:
    """Documentation and source, together at most `limit` bytes."""
    found = sorted(_files())
    prose = [path for name, path in found if not name.endswith(".py")]
    source = sorted((hashlib.sha256(name.encode()).digest(), path) for name, path in found if name.endswith(".py"))
    seen: set[bytes] = set()
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for kind, paths in enumerate((prose, [path for _, path in source])):
        for path in paths:
            text = _read(path)
            key = hashlib.sha256(text).digest()
            if not text or key in seen:
                continue
            if total + len(text) > limit:
                return texts
            seen.add(key)
            texts[kind].append(text)
            total += len(text)
    return texts


def _files() -> Iterator[tuple[str, Path]]:
    """Each candidate once: its path relative to the folder in which it was found, and its place."""
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")] + list(SYSTEM_FOLDERS)
    seen: set[str] = set()
    for folder in folders:
        for place, below, names in os.walk(os.path.realpath(folder)):
            if place in seen:  # site-packages lies inside the standard library
                below.clear()
                continue
            seen.add(place)
            below[:] = sorted(name for name in below if name != "__pycache__")
            for name in names:
                lower = name.lower()
                if lower.endswith((".py", *PROSE_SUFFIXES)) or lower.startswith(PROSE_NAMES):
                    path = Path(place, name)
                    yield str(path.relative_to(os.path.realpath(folder))), path


def _read(path: Path) -> bytes:
    """The file, or nothing if it is not text that a person wrote."""
    try:
        if not SMALLEST <= path.stat().st_size <= LARGEST:
            return b""
        text = path.read_bytes()
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return b""
    letters = 1 - len(text.translate(None, _LETTERS)) / max(1, len(text))
    return text if letters >= LEAST_LETTERS and max(map(len, text.splitlines())) <= LONGEST_LINE else b""


def _tokenize(texts: list[bytes], vocabulary: int) -> tuple[Tensor, str]:
    """All texts, an end token after each."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        end = torch.tensor([256], dtype=torch.int32)
        parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8).int() for text in texts]
        return torch.cat([piece for part in parts for piece in (part, end)]), "bytes"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    strings = [text.decode("utf-8") for text in texts]
    stride = max(1, round(sum(map(len, texts)) / SAMPLE_BYTES))
    tokenizer.train_from_iterator(strings[::stride], trainer)
    parts = []
    for start in range(0, len(strings), 512):
        encoded = tokenizer.encode_batch_fast(strings[start : start + 512], add_special_tokens=False)
        end = tokenizer.token_to_id(END)
        parts.append(torch.tensor([token for one in encoded for token in (*one.ids, end)], dtype=torch.int32))
    return torch.cat(parts), f"BPE of {tokenizer.get_vocab_size():,} tokens"


def main() -> None:
    """Say what text there is here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="how much text to take at most")
    parser.add_argument("--vocabulary", type=int, default=25_344, help="tokens of the BPE")
    arguments = parser.parse_args()
    start = time.perf_counter()
    _, facts = load(arguments.megabytes, arguments.vocabulary)
    print(facts)
    print(asdict(facts))
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
