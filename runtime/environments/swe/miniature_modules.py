"""What miniatures are made of: small modules, their tests, and bugs that one or more of the tests show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent


@dataclass(frozen=True)
class Bug:
    """``wrong`` in the place of ``right``, which occurs once in the module."""

    right: str
    wrong: str
    problem: str
    """As a user would report it."""
    tests: tuple[str, ...]
    """Those that fail with it."""


@dataclass(frozen=True)
class Module:
    """A module and its tests by name, each the body of a method."""

    name: str
    source: str
    tests: dict[str, str]
    bugs: tuple[Bug, ...]

    @property
    def test_class(self) -> str:
        return f"{self.name.title()}Test"

    def test_file(self, package: str, without: Sequence[str] = ()) -> str:
        head = f"import unittest\n\nfrom {package} import {self.name}\n\n\n"
        head += f"class {self.test_class}(unittest.TestCase):\n"
        methods = [
            f"    def {name}(self):\n{indent(body, ' ' * 8)}"
            for name, body in self.tests.items()
            if name not in without
        ]
        return head + "\n".join(methods)


NUMBERS = Module(
    name="numbers",
    source='''\
def clamp(value, lowest, highest):
    """value, or the nearer end where it lies outside."""
    if lowest > highest:
        raise ValueError("lowest is above highest")
    return max(lowest, min(value, highest))


def mean(values):
    """Arithmetic mean. Raises ValueError where there are no values."""
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)


def digits(number, base=10):
    """Digits of a number that is not negative, the most significant first."""
    if number == 0:
        return [0]
    found = []
    while number > 0:
        number, rest = divmod(number, base)
        found.append(rest)
    return found[::-1]
''',
    tests={
        "test_clamp_inside": "self.assertEqual(numbers.clamp(3, 0, 5), 3)\n",
        "test_clamp_outside": "self.assertEqual([numbers.clamp(v, 0, 5) for v in (-1, 9)], [0, 5])\n",
        "test_clamp_refuses": "with self.assertRaises(ValueError):\n    numbers.clamp(1, 5, 0)\n",
        "test_mean": "self.assertEqual(numbers.mean([1, 2, 6]), 3)\n",
        "test_mean_of_nothing": "with self.assertRaises(ValueError):\n    numbers.mean([])\n",
        "test_digits": "self.assertEqual(numbers.digits(1203), [1, 2, 0, 3])\n",
        "test_digits_of_zero": "self.assertEqual(numbers.digits(0), [0])\n",
        "test_digits_base": "self.assertEqual(numbers.digits(10, 2), [1, 0, 1, 0])\n",
    },
    bugs=(
        Bug(
            "max(lowest, min(value, highest))",
            "min(lowest, max(value, highest))",
            "clamp(3, 0, 5) gives 0, and so does clamp(9, 0, 5), which should be 5.",
            ("test_clamp_inside", "test_clamp_outside"),
        ),
        Bug(
            "sum(values) / len(values)",
            "sum(values) // (len(values) + 1)",
            "The mean of [1, 2, 6] is said to be 2; it is 3.",
            ("test_mean",),
        ),
        Bug(
            '    if not values:\n        raise ValueError("no values")\n',
            "",
            "mean([]) raises ZeroDivisionError. The docstring promises ValueError.",
            ("test_mean_of_nothing",),
        ),
        Bug(
            "return found[::-1]",
            "return found",
            "digits(1203) gives the digits in the wrong order.",
            ("test_digits", "test_digits_base"),
        ),
        Bug(
            "    if number == 0:\n        return [0]\n",
            "",
            "digits(0) gives an empty list; it should be [0].",
            ("test_digits_of_zero",),
        ),
    ),
)

TEXT = Module(
    name="text",
    source='''\
def words(line):
    """Words of a line in lower case, without the signs around them."""
    found = [word.strip(".,;:!?").lower() for word in line.split()]
    return [word for word in found if word]


def shorten(line, width):
    """line, or as much of it as fits in width with three dots at its end."""
    if len(line) <= width:
        return line
    return line[: width - 3] + "..."


def is_palindrome(line):
    """Whether the letters read alike both ways, whatever their case."""
    letters = [letter.lower() for letter in line if letter.isalpha()]
    return letters == letters[::-1]


def capitals(line):
    """Every word with a capital letter, the rest of it as it is."""
    return " ".join(word[:1].upper() + word[1:] for word in line.split(" "))
''',
    tests={
        "test_words": 'self.assertEqual(text.words("Well, no."), ["well", "no"])\n',
        "test_words_without_letters": 'self.assertEqual(text.words("a ... b"), ["a", "b"])\n',
        "test_shorten_fits": 'self.assertEqual(text.shorten("short", 5), "short")\n',
        "test_shorten": 'self.assertEqual(text.shorten("a long line", 8), "a lon...")\n',
        "test_palindrome": 'self.assertTrue(text.is_palindrome("Never odd or even"))\n',
        "test_no_palindrome": 'self.assertFalse(text.is_palindrome("abca"))\n',
        "test_capitals": 'self.assertEqual(text.capitals("the iPad mini"), "The IPad Mini")\n',
    },
    bugs=(
        Bug(
            "return [word for word in found if word]",
            "return found",
            'words("a ... b") has an empty word in it.',
            ("test_words_without_letters",),
        ),
        Bug(
            "len(line) <= width",
            "len(line) < width",
            'shorten("short", 5) cuts a line that fits exactly.',
            ("test_shorten_fits",),
        ),
        Bug(
            "line[: width - 3]",
            "line[:width]",
            "Shortened lines are three characters wider than asked for.",
            ("test_shorten",),
        ),
        Bug(
            "[letter.lower() for letter in line if letter.isalpha()]",
            "[letter for letter in line if letter.isalpha()]",
            '"Never odd or even" is a palindrome, and is_palindrome says it is not.',
            ("test_palindrome",),
        ),
        Bug(
            "word[:1].upper() + word[1:]",
            "word.capitalize()",
            'capitals("the iPad mini") changes letters that are not the first of a word.',
            ("test_capitals",),
        ),
    ),
)

LISTS = Module(
    name="lists",
    source='''\
def chunks(values, size):
    """values in lists of size; the last may be shorter."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def unique(values):
    """Each value once, in the order in which they first came."""
    seen = set()
    found = []
    for value in values:
        if value not in seen:
            seen.add(value)
            found.append(value)
    return found


def flatten(values):
    """The values of nested lists, however deep."""
    found = []
    for value in values:
        if isinstance(value, list):
            found.extend(flatten(value))
        else:
            found.append(value)
    return found


def rotate(values, places):
    """values moved to the left; what falls out comes back at the end."""
    if not values:
        return []
    places %= len(values)
    return values[places:] + values[:places]
''',
    tests={
        "test_chunks": "self.assertEqual(lists.chunks([1, 2, 3, 4], 2), [[1, 2], [3, 4]])\n",
        "test_last_chunk": "self.assertEqual(lists.chunks([1, 2, 3], 2), [[1, 2], [3]])\n",
        "test_unique": "self.assertEqual(lists.unique([3, 1, 3, 2, 1]), [3, 1, 2])\n",
        "test_flatten": "self.assertEqual(lists.flatten([1, [2, 3]]), [1, 2, 3])\n",
        "test_flatten_deep": "self.assertEqual(lists.flatten([[[1]], [2, [3]]]), [1, 2, 3])\n",
        "test_rotate": "self.assertEqual(lists.rotate([1, 2, 3], 1), [2, 3, 1])\n",
        "test_rotate_far": "self.assertEqual(lists.rotate([1, 2, 3], 4), [2, 3, 1])\n",
        "test_rotate_nothing": "self.assertEqual(lists.rotate([], 2), [])\n",
    },
    bugs=(
        Bug(
            "range(0, len(values), size)",
            "range(0, len(values) - size + 1, size)",
            "chunks([1, 2, 3], 2) loses the 3.",
            ("test_last_chunk",),
        ),
        Bug(
            "    return found\n\n\ndef flatten",
            "    return sorted(found)\n\n\ndef flatten",
            "unique changes the order of the values.",
            ("test_unique",),
        ),
        Bug(
            "found.extend(flatten(value))",
            "found.extend(value)",
            "flatten leaves lists within lists as they are.",
            ("test_flatten_deep",),
        ),
        Bug(
            "    places %= len(values)\n",
            "",
            "rotate([1, 2, 3], 4) does nothing; it should do what rotating by 1 does.",
            ("test_rotate_far",),
        ),
        Bug(
            "values[places:] + values[:places]",
            "values[-places:] + values[:-places]",
            "rotate moves the values to the right; it should be to the left.",
            ("test_rotate", "test_rotate_far"),
        ),
    ),
)

INTERVALS = Module(
    name="intervals",
    source='''\
def overlap(first, second):
    """Whether two intervals (start, end) share more than an end."""
    return first[0] < second[1] and second[0] < first[1]


def merge(intervals):
    """Intervals that touch or overlap as one, in order."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals):
    """Length that intervals cover together, each part counted once."""
    return sum(end - start for start, end in merge(intervals))
''',
    tests={
        "test_overlap": "self.assertTrue(intervals.overlap((0, 3), (2, 5)))\n",
        "test_no_overlap": "self.assertFalse(intervals.overlap((0, 1), (2, 5)))\n",
        "test_ends_are_no_overlap": "self.assertFalse(intervals.overlap((0, 2), (2, 5)))\n",
        "test_merge": "self.assertEqual(intervals.merge([(4, 6), (0, 2), (1, 3)]), [(0, 3), (4, 6)])\n",
        "test_merge_touching": "self.assertEqual(intervals.merge([(0, 2), (2, 4)]), [(0, 4)])\n",
        "test_merge_within": "self.assertEqual(intervals.merge([(0, 9), (1, 2)]), [(0, 9)])\n",
        "test_total": "self.assertEqual(intervals.total([(0, 2), (1, 3), (10, 11)]), 4)\n",
    },
    bugs=(
        Bug(
            "first[0] < second[1] and second[0] < first[1]",
            "first[0] <= second[1] and second[0] <= first[1]",
            "overlap says that (0, 2) and (2, 5) overlap; they only meet.",
            ("test_ends_are_no_overlap",),
        ),
        Bug(
            "in sorted(intervals)",
            "in intervals",
            "merge is wrong where the intervals do not come in order.",
            ("test_merge",),
        ),
        Bug(
            "start <= merged[-1][1]",
            "start < merged[-1][1]",
            "merge leaves (0, 2) and (2, 4) apart.",
            ("test_merge_touching",),
        ),
        Bug(
            "max(merged[-1][1], end)",
            "end",
            "merging (0, 9) with (1, 2), which lies within it, makes it shorter.",
            ("test_merge_within",),
        ),
        Bug(
            "in merge(intervals))",
            "in intervals)",
            "total counts what several intervals cover more than once.",
            ("test_total",),
        ),
    ),
)

TABLES = Module(
    name="tables",
    source='''\
def parse(line, separator=","):
    """Cells of a line, without blanks around them."""
    return [cell.strip() for cell in line.split(separator)]


def columns(rows):
    """Rows as columns. Raises ValueError where rows are of different lengths."""
    if len({len(row) for row in rows}) > 1:
        raise ValueError("rows of different lengths")
    return [list(column) for column in zip(*rows)]


def count(values):
    """How often each value comes, as a dict."""
    counts = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def most_common(values):
    """The value that comes most often; the first of several."""
    counts = count(values)
    return max(counts, key=counts.get)
''',
    tests={
        "test_parse": 'self.assertEqual(tables.parse("a,b"), ["a", "b"])\n',
        "test_parse_blanks": 'self.assertEqual(tables.parse(" a , b "), ["a", "b"])\n',
        "test_parse_separator": 'self.assertEqual(tables.parse("a;b", ";"), ["a", "b"])\n',
        "test_columns": "self.assertEqual(tables.columns([[1, 2], [3, 4]]), [[1, 3], [2, 4]])\n",
        "test_columns_refuse": "with self.assertRaises(ValueError):\n    tables.columns([[1], [2, 3]])\n",
        "test_count": 'self.assertEqual(tables.count("abba"), {"a": 2, "b": 2})\n',
        "test_most_common": "self.assertEqual(tables.most_common([1, 2, 2, 3]), 2)\n",
    },
    bugs=(
        Bug(
            "[cell.strip() for cell in line.split(separator)]",
            "line.split(separator)",
            'parse(" a , b ") keeps the blanks.',
            ("test_parse_blanks",),
        ),
        Bug(
            "line.split(separator)",
            'line.split(",")',
            "parse ignores the separator it is given.",
            ("test_parse_separator",),
        ),
        Bug(
            "    if len({len(row) for row in rows}) > 1:\n"
            '        raise ValueError("rows of different lengths")\n',
            "",
            "columns drops cells without a word where a row is longer than another.",
            ("test_columns_refuse",),
        ),
        Bug(
            "counts.get(value, 0) + 1",
            "1",
            "count gives 1 for everything, so most_common is wrong too.",
            ("test_count", "test_most_common"),
        ),
        Bug(
            "max(counts, key=counts.get)",
            "max(counts)",
            "most_common gives the largest value, not the most common one.",
            ("test_most_common",),
        ),
    ),
)

MODULES = (NUMBERS, TEXT, LISTS, INTERVALS, TABLES)
