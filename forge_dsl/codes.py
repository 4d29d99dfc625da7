from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CodeInfo:
    code: str
    slug: str
    severity: Literal["error", "warning"]
    explanation: str
    failing: str
    fixed: str


CODES: dict[str, CodeInfo] = {}
