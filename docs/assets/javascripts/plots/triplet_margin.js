// One row of triplet margin: six negatives, evenly from cosine `hardest` down by `spread`.
export const x = { label: "cosine of anchor and positive" }
export const panels = { value: "loss", gradient: "gradient by that cosine" }
export const sliders = {
  margin: { label: "margin", min: 0, max: 1, step: 0.05, value: 0.3 },
  hardest: { label: "cosine of the hardest negative", min: -0.5, max: 0.9, step: 0.05, value: 0.2 },
  spread: { label: "from hardest to easiest of six", min: 0, max: 1, step: 0.05, value: 0 },
}
export const lines = {
  "m = 0.3": { margin: 0.3, hardest: 0.2, spread: 0 },
  "m = 0.6": { margin: 0.6, hardest: 0.2, spread: 0 },
  "m = 0.3, six negatives": { margin: 0.3, hardest: 0.2, spread: 1 },
}

export function curves({ margin, hardest, spread }) {
  const xs = Array.from({ length: 200 }, (_, i) => (i + 0.5 - 100) / 100)
  const negatives = Array.from({ length: 6 }, (_, k) => hardest - (spread * k) / 5)
  const hinges = xs.map((cosine) => negatives.map((negative) => margin - cosine + negative))
  return {
    x: xs,
    value: { "": hinges.map((row) => row.reduce((sum, h) => sum + Math.max(0, h), 0) / 6) },
    gradient: { "": hinges.map((row) => -row.filter((h) => h > 0).length / 6) },
  }
}
