// One row: a token of the positive at activation x with its weight, `tokens - 1` others of weight 1.
export const x = { label: "activation of one token of the positive" }
export const panels = { value: "loss of the row", gradient: "gradient by that activation" }
export const sliders = {
  weight: { label: "weight of the token", min: 0.01, max: 10, value: 1, log: true },
  tokens: { label: "tokens of the positive", min: 1, max: 256, value: 10, log: true, integer: true },
  others: { label: "activation of the others", min: 0, max: 4, step: 0.1, value: 1 },
}
export const lines = {
  "weight 1.0": { weight: 1, tokens: 10, others: 1 },
  "weight 0.1": { weight: 0.1, tokens: 10, others: 1 },
}

const softplus = (z) => Math.max(z, 0) + Math.log1p(Math.exp(-Math.abs(z)))

export function curves({ weight, tokens, others }) {
  const xs = Array.from({ length: 121 }, (_, i) => i / 20)
  const total = weight + tokens - 1
  const row = (cost) => xs.map((s) => (weight * cost(s) + (tokens - 1) * cost(others)) / total)
  return {
    x: xs,
    value: { plain: row((s) => -s), saturating: row((s) => softplus(-s)) },
    gradient: {
      plain: xs.map(() => -weight / total),
      saturating: xs.map((s) => -weight / total / (1 + Math.exp(s))),
    },
  }
}
