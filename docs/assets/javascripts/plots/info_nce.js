// One row of InfoNCE: the positive at cosine x, `negatives` candidates at cosine 0, temperature t.
export const x = { label: "cosine of anchor and positive" }
export const panels = { value: "loss, in nats", gradient: "gradient by that cosine" }
export const sliders = {
  temperature: { label: "temperature", min: 0.01, max: 1, value: 0.07, log: true },
  negatives: { label: "negatives at cosine 0", min: 1, max: 4095, value: 31, log: true, integer: true },
}
export const lines = {
  "t = 0.02": { temperature: 0.02, negatives: 31 },
  "t = 0.07": { temperature: 0.07, negatives: 31 },
  "t = 0.2": { temperature: 0.2, negatives: 31 },
  "t = 1.0": { temperature: 1, negatives: 31 },
}

const softplus = (z) => Math.max(z, 0) + Math.log1p(Math.exp(-Math.abs(z)))

export function curves({ temperature, negatives }) {
  const xs = Array.from({ length: 201 }, (_, i) => -1 + i / 100)
  const lead = xs.map((s) => Math.log(negatives) - s / temperature)
  return {
    x: xs,
    value: { "": lead.map(softplus) },
    gradient: { "": lead.map((z) => -1 / (1 + Math.exp(-z)) / temperature) },
  }
}
