"""Pure planning: from expressions and flat ranges to a proved, costed plan. No I/O, no ranks, no memory."""
