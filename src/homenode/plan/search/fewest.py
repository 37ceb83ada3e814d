"""Fewest: which groups to draw from so that few are touched and the rest stays usable.

Both LLCs (of cores) and switches (of GPUs) are chosen so.
"""

from collections.abc import Sequence


def fewest(counts: Sequence[int], wanted: int) -> tuple[int, ...]:
    """Positions of the fewest groups that together hold `wanted`, ascending.

    Among those the tightest, so that whole groups stay whole; among those the lowest positions.
    () where all together hold too little, or wanted is 0. Polynomial: counts are added up as bits
    of one integer per number of groups.

    >>> fewest([8, 8, 8], 16), fewest([8, 4, 8], 4), fewest([8, 4, 8], 12)
    ((0, 1), (1,), (0, 1))
    """
    if wanted <= 0 or sum(counts) < wanted:
        return ()
    number, owned = 0, 0
    for count in sorted(counts, reverse=True):
        number, owned = number + 1, owned + count
        if owned >= wanted:
            break
    if len(set(counts)) == 1:
        return tuple(range(number))
    # sums[i][c]: bit s is set where c of the groups i.. can hold exactly s.
    sums = [[0] * (number + 1) for _ in range(len(counts) + 1)]
    sums[-1][0] = 1
    for i in range(len(counts) - 1, -1, -1):
        sums[i][0] = 1
        for c in range(1, number + 1):
            sums[i][c] = sums[i + 1][c] | sums[i + 1][c - 1] << counts[i]
    enough = sums[0][number] >> wanted
    target = wanted + (enough & -enough).bit_length() - 1
    chosen: list[int] = []
    for i, count in enumerate(counts):
        left = number - len(chosen)
        if left and target >= count and sums[i + 1][left - 1] >> (target - count) & 1:
            chosen.append(i)
            target -= count
    return tuple(chosen)
