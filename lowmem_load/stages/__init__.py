"""The stages of a load, in order: describe, plan, agree, execute, agree, report."""
