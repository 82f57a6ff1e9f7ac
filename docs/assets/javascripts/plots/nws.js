// One row of NWS: a key at cosine x whose label is like the query's by `similarity`, the query's own
// prototype at cosine 0.5, `prototypes` others at cosine 0, eps = 0.
export const x = { label: "cosine of query and key" }
export const panels = { value: "loss, in nats", gradient: "gradient by that cosine" }
export const sliders = {
  similarity: { label: "similarity of the labels", min: 0, max: 1, step: 0.01, value: 0.5 },
  beta: { label: "beta", min: 0, max: 4, step: 0.05, value: 1 },
  temperature: { label: "temperature", min: 0.02, max: 1, value: 0.07, log: true },
  prototypes: { label: "other prototypes, at cosine 0", min: 1, max: 1023, value: 31, log: true, integer: true },
}
export const lines = {
  "S = 0.0": { similarity: 0, beta: 1, temperature: 0.07, prototypes: 31 },
  "S = 0.5": { similarity: 0.5, beta: 1, temperature: 0.07, prototypes: 31 },
  "S = 0.9": { similarity: 0.9, beta: 1, temperature: 0.07, prototypes: 31 },
  "S = 1.0": { similarity: 1, beta: 1, temperature: 0.07, prototypes: 31 },
}

const POSITIVE = 0.5

export function curves({ similarity, beta, temperature, prototypes }) {
  const xs = Array.from({ length: 200 }, (_, i) => (i + 0.5) / 100 - 1)
  const keys = xs.map((s) => beta * (1 - similarity) * Math.exp(s / temperature))
  return {
    x: xs,
    value: { "": keys.map((key) => Math.log(key + prototypes) - POSITIVE / temperature) },
    gradient: { "": keys.map((key) => key / (key + prototypes) / temperature) },
  }
}
