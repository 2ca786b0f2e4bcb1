// Pages that are read from the disk may not start workers, and the search is one. Here a frame does its work.
// (The offline plugin of the theme would fetch such a script from elsewhere.)
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = Object.assign(document.createElement("iframe"), {hidden: true, srcdoc: "<!doctype html>"})
      this.inside = new Promise(resolve => {
        frame.onload = () => {
          const inside = frame.contentWindow, load = src => new Promise(done =>
            inside.document.head.append(Object.assign(inside.document.createElement("script"), {src, onload: done})))
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
          inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => load(one)), Promise.resolve())
          load(url).then(() => resolve(inside))
        }
      })
      document.documentElement.append(frame)
    }
    postMessage(data) {
      this.inside.then(inside => inside.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
