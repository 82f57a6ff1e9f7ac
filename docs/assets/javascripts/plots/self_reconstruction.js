// One text: its `tokens` own tokens at score x, the other tokens of the vocabulary at `others`.
export const x = { label: "score of the text's own tokens" }
export const panels = { value: "loss, in nats", pull: "log10 of the pull on one own token" }
export const sliders = {
  vocabulary: { label: "vocabulary", min: 2500, max: 250000, value: 250000, log: true, integer: true },
  tokens: { label: "own tokens", min: 1, max: 500, value: 30, log: true, integer: true },
  others: { label: "score of all other tokens", min: -6, max: 6, step: 0.1, value: 0 },
}
export const lines = {
  "V = 8,000": { vocabulary: 8000, tokens: 30, others: 0 },
  "V = 250,000": { vocabulary: 250000, tokens: 30, others: 0 },
}

const softplus = (z) => Math.max(z, 0) + Math.log1p(Math.exp(-Math.abs(z)))

export function curves({ vocabulary, tokens, others }) {
  const xs = Array.from({ length: 121 }, (_, i) => -6 + i / 10)
  const rest = vocabulary - tokens
  const plain = xs.map((s) => (tokens * softplus(-s) + rest * softplus(others)) / vocabulary)
  const balanced = xs.map((s) => (softplus(-s) + softplus(others)) / 2)
  const pull = (share) => xs.map((s) => Math.log10(share / (1 + Math.exp(s))))
  return {
    x: xs,
    value: { plain, balanced },
    pull: { plain: pull(1 / vocabulary), balanced: pull(1 / (2 * tokens)) },
  }
}
