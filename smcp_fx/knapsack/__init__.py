"""The multiple-choice knapsack, solved exactly."""

from smcp_fx.knapsack.solve import KnapsackSolution, solve_knapsack

__all__ = ["KnapsackSolution", "solve_knapsack"]
