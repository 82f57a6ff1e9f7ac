// One row: the teacher's best candidate leads by `lead`, the others stand evenly from 0 to -lead.
// The student agrees but for its best one's lead, which is x times the teacher's.
export const x = { label: "student's lead / teacher's lead" }
export const panels = { value: "each part of the loss", gradient: "gradient by the best candidate's score" }
export const sliders = {
  lead: { label: "the teacher's lead", min: 0.05, max: 50, value: 0.5, log: true },
  temperature: { label: "temperature T", min: 0.1, max: 10, step: 0.1, value: 3 },
  candidates: { label: "candidates", min: 3, max: 64, value: 8, log: true, integer: true },
}
export const lines = {
  "cosines, lead 0.5": { lead: 0.5, temperature: 3, candidates: 8 },
  "over 0.05, lead 10": { lead: 10, temperature: 3, candidates: 8 },
}

const sum = (values) => values.reduce((a, b) => a + b, 0)

function logSoftmax(scores) {
  const top = Math.max(...scores)
  const log = Math.log(sum(scores.map((s) => Math.exp(s - top))))
  return scores.map((s) => s - top - log)
}

function divergence(student, teacher, t) {
  const q = logSoftmax(student.map((s) => s / t))
  const p = logSoftmax(teacher.map((s) => s / t))
  // p log(p / q) - p + q, which is never below 0: the two last ones add up to nothing.
  const terms = p.map((a, c) => {
    const ratio = a - q[c]
    if (Math.abs(ratio) < 1) return Math.exp(a) * (ratio + Math.expm1(-ratio))
    return Math.exp(a) * ratio + Math.exp(q[c]) - Math.exp(a)
  })
  // By the others' probabilities: the best one's, near 1, would lose its digits.
  const others = (log) => sum(log.slice(1).map(Math.exp))
  return [t * t * sum(terms), t * (others(p) - others(q))]
}

function standardized(scores) {
  const mean = sum(scores) / scores.length
  const deviation = Math.sqrt(sum(scores.map((s) => (s - mean) ** 2)) / (scores.length - 1))
  return [scores.map((s) => (s - mean) / (deviation + 1e-8)), deviation]
}

function squaredError(student, teacher) {
  const [z, deviation] = standardized(student)
  const n = z.length
  const difference = standardized(teacher)[0].map((v, c) => z[c] - v)
  const along = (sum(difference.map((d, c) => d * z[c])) * (deviation + 1e-8)) / ((n - 1) * deviation)
  const slope = difference[0] - sum(difference) / n - along * z[0]
  return [sum(difference.map((d) => d * d)) / n, (2 * slope) / (n * (deviation + 1e-8))]
}

export function curves({ lead, temperature, candidates }) {
  const xs = Array.from({ length: 122 }, (_, i) => -1 + (4 * i) / 121)
  const teacher = Array.from({ length: candidates }, (_, c) => (c === 0 ? lead : (-(c - 1) / (candidates - 1)) * lead))
  const students = xs.map((share) => [share * lead, ...teacher.slice(1)])
  const kl = students.map((student) => divergence(student, teacher, temperature))
  const z = students.map((student) => squaredError(student, teacher))
  const column = (pairs, index) => pairs.map((pair) => pair[index])
  return {
    x: xs,
    value: { KL: column(kl, 0), "z-scores": column(z, 0) },
    gradient: { KL: column(kl, 1), "z-scores": column(z, 1) },
  }
}
