"""Rewards of one's own: each gets the model's answer and the row of the data set, and gives a number."""


def right(answer, row):
    """1 for the right answer, else 0."""
    return float(answer.strip() == row["answer"])


def letters_in_place(answer, row):
    """Which share of the letters is right: what a model that is never quite right yet can learn from."""
    pairs = zip(answer.strip(), row["answer"], strict=False)
    return sum(a == b for a, b in pairs) / max(len(answer.strip()), len(row["answer"]))
