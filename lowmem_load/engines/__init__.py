"""Who owns which elements under ZeRO-3 and DTensor, and the targets that make that memory."""
