"""From a row of logits to the next token of its request.

What changes the choice acts in the order that vLLM's V1 sampler documents, on float32:

1. Log-probabilities are taken from the logits as they came.
2. Before `min_tokens`, tokens that would end the output are masked.
3. `logit_bias` is added.
4. Penalties: repetition, then frequency, then presence.
5. Temperature 0 takes the largest, the lowest id where several are. Else divide by the temperature.
6. Keep by `min_p`, then by `top_k`, then by `top_p`.
7. Draw by the Gumbel-max rule, with noise that only the seed, the output position and the token
   decide.
"""
