"""Products and their sums as intervals: what is known of equal factors, and of shares that add up to one."""

from __future__ import annotations

from dataclasses import dataclass

from forge_dsl.analysis import intervals as iv
from forge_dsl.analysis.intervals import Interval
from forge_dsl.language import syntax


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of a product, each with its interval, and whether the product's sign is turned."""

    items: list[tuple[syntax.Expr, Interval]]
    negative: bool

    def product(self) -> Interval:
        """Where the product lies: equal factors make squares, whatever stands between them."""
        counts: dict[syntax.Expr, int] = {}
        values: dict[syntax.Expr, Interval] = {}
        for factor, value in self.items:
            counts[factor] = counts.get(factor, 0) + 1
            values[factor] = value
        result = iv.point(1.0)
        for factor, count in counts.items():
            for _ in range(count // 2):
                result = iv.multiply(result, iv.square(values[factor]))
            if count % 2:
                result = iv.multiply(result, values[factor])
        return iv.negate(result) if self.negative else result

    def without(self, taken: syntax.Expr) -> Factors:
        """The same product without the first factor equal to `taken`."""
        index = next(i for i, (factor, _) in enumerate(self.items) if factor == taken)
        return Factors(self.items[:index] + self.items[index + 1 :], self.negative)


def sum_of(left: Factors, right: Factors) -> Interval:
    """Where the sum of two products lies. A moving average `b * x + (1 - b) * y` with b in [0, 1] lies between x and
    y.
    """
    total = iv.add(left.product(), right.product())
    for mine, other in ((left, right), (right, left)):
        for rest, _ in other.items:
            match rest:
                case syntax.Binary(op="-", left=syntax.Number(value=1.0), right=share):
                    weight = next((value for factor, value in mine.items if factor == share), None)
                    if weight is not None and weight.within(iv.UNIT):
                        between = iv.hull(mine.without(share).product(), other.without(rest).product())
                        return iv.meet(between, total)
    return total
