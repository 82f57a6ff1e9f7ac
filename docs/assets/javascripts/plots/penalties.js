// The penalty of an ordinary token, by the number of documents that hold it: of 1,000,000 documents the
// commonest token is in 600,000 and the rarest in none.
export const x = { label: "documents with the token, of 1,000,000", log: true }
export const panels = { penalty: "penalty", log10: "log10 of the penalty" }
export const sliders = {
  alpha: { label: "alpha", min: 0, max: 10, step: 0.1, value: 4 },
  minimum: { label: "minimum", min: 0, max: 0.5, step: 0.01, value: 0.05 },
}
export const lines = {
  "α = 1": { alpha: 1, minimum: 0 },
  "α = 2.5": { alpha: 2.5, minimum: 0 },
  "α = 4": { alpha: 4, minimum: 0 },
  "α = 4, minimum 0.1": { alpha: 4, minimum: 0.1 },
}

const COMMONEST = 600000

export function curves({ alpha, minimum }) {
  const steps = Array.from({ length: 121 }, (_, i) => Math.round(COMMONEST ** (i / 120)))
  const df = [...new Set(steps)]
  const exponent = alpha / Math.log((COMMONEST + 0.5) / 0.5)
  const penalty = df.map((n) => Math.max(minimum, ((n + 0.5) / (COMMONEST + 0.5)) ** exponent))
  return { x: df, penalty: { "": penalty }, log10: { "": penalty.map(Math.log10) } }
}
