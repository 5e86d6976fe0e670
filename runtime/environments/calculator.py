"""A calculator for text that a model wrote: numbers and + - * / ( ), and nothing that could take long."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 200
"""Letters of an expression."""
LARGEST = 10**30
"""Of what is computed, in between too."""
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculatorError(ValueError):
    """What cannot be computed. The text says why, for the model to read."""


def calculate(expression: str) -> str:
    """Its value, written without a needless fraction. Raises CalculatorError."""
    if len(expression) > LONGEST:
        raise CalculatorError(f"the expression is longer than {LONGEST} letters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, CalculatorError):
            raise
        raise CalculatorError("the expression cannot be read; use numbers and + - * / ( )") from None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else format(value, ".10g")
    return str(value)


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            first, second = _value(left), _value(right)
            if isinstance(sign, ast.Div) and not second:
                raise CalculatorError("division by zero")
            value = _OPERATIONS[type(sign)](first, second)
        case _:
            raise CalculatorError("only numbers and + - * / ( ) can be computed")
    if not abs(value) <= LARGEST:
        raise CalculatorError("the numbers become too large")
    return value
