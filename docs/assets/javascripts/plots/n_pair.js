// One row of N-pair: anchor and positive of one length at cosine x, `negatives` candidates at dot 0.
export const x = { label: "cosine of anchor and positive" }
export const panels = { value: "loss, in nats", gradient: "gradient by their dot product" }
export const sliders = {
  length: { label: "length of the vectors", min: 0.5, max: 10, value: 2, log: true },
  negatives: { label: "negatives at dot product 0", min: 1, max: 4095, value: 31, log: true, integer: true },
}
export const lines = {
  "length 1": { length: 1, negatives: 31 },
  "length 2": { length: 2, negatives: 31 },
  "length 4": { length: 4, negatives: 31 },
  "length 8": { length: 8, negatives: 31 },
}

const softplus = (z) => Math.max(z, 0) + Math.log1p(Math.exp(-Math.abs(z)))

export function curves({ length, negatives }) {
  const xs = Array.from({ length: 200 }, (_, i) => (i + 0.5) / 100 - 1)
  const lead = xs.map((cosine) => Math.log(negatives) - length ** 2 * cosine)
  return {
    x: xs,
    value: { "": lead.map(softplus) },
    gradient: { "": lead.map((z) => -1 / (1 + Math.exp(-z))) },
  }
}
