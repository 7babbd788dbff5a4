// Asks the search of the site: `node search.js WORKER INDEX` reads a JSON list of questions, and
// prints for each one the addresses of the sections of every hit.
const fs = require("fs")
const vm = require("vm")

const [worker, index] = process.argv.slice(2)
let answer, ask
const page = {
  console,
  addEventListener: (kind, listener) => (ask = listener),
  postMessage: (message) => (answer = message),
}
page.self = page
vm.runInNewContext(fs.readFileSync(worker, "utf8"), page)

async function main() {
  const [SETUP, QUERY] = [0, 2] // of Material's messages to the worker
  const content = JSON.parse(fs.readFileSync(index, "utf8"))
  await ask({ data: { type: SETUP, data: { ...content, options: { suggest: false } } } })
  const hits = {}
  for (const question of JSON.parse(fs.readFileSync(0, "utf8"))) {
    await ask({ data: { type: QUERY, data: question } })
    hits[question] = answer.data.items.map((sections) => sections.map((section) => section.location))
  }
  console.log(JSON.stringify(hits))
}

main()
